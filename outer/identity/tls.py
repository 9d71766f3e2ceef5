"""What a rank needs for TLS 1.3: contexts for both sides, and a certificate that binds a connection to island keys.

No authority signs the certificate, and the island's key is not in it: its key is made for this process. TLS proves that
whoever accepts a connection holds that key. The handshake of outer/network/handshake.py covers the certificate's hash
and is signed with the island keys of both ends. So nobody between the two can end the connection in their place.
"""

import hashlib
import os
import ssl
import tempfile
from datetime import datetime

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALWAYS = datetime(2000, 1, 1), datetime(9999, 12, 31)
"""Nobody looks at the dates of the certificate: it lives as long as its process."""


class TlsIdentity:
    """TLS 1.3 for the connections of one process, and nothing older."""

    def __init__(self) -> None:
        self.server, self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.server.num_tickets = 0  # A session that is resumed would not be bound to the certificate.
        self.client.check_hostname = False
        self.client.verify_mode = ssl.CERT_NONE  # TLS proves the certificate's key, the handshake whose it is.
        self.certificate = _load_new_certificate(self.server)
        """Hash of this process's certificate: what the handshake of a connection that it accepts covers."""


def hash_certificate(der: bytes | None) -> str:
    """The hash of a certificate, in hexadecimal digits. `der`: as ssl returns the other side's in binary form."""
    return hashlib.sha256(der or b"").hexdigest()


def _load_new_certificate(context: ssl.SSLContext) -> str:
    """Make a key and a certificate that it signs, give both to `context`, and return the certificate's hash."""
    from cryptography import x509  # Here, because all commands would wait for it, and few make a certificate.

    key, nobody = Ed25519PrivateKey.generate(), x509.Name([])
    builder = x509.CertificateBuilder(nobody, nobody, key.public_key(), x509.random_serial_number(), *ALWAYS)
    certificate = builder.sign(key, None)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # OpenSSL reads keys from files only. This one is readable by this user, and gone at once.
    descriptor, path = tempfile.mkstemp()
    try:
        with open(descriptor, "wb") as file:
            file.write(certificate.public_bytes(pem) + secret)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return hash_certificate(certificate.public_bytes(serialization.Encoding.DER))

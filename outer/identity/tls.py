"""TLS 1.3 for a rank: contexts for both sides, and a certificate that binds a connection to island
keys.

No authority signs the certificate, and it does not contain the island's key: its key is created for
this process. TLS proves that the acceptor of a connection holds the certificate's key. The
handshake of outer/network/handshake.py covers the certificate's hash and is signed with the island
keys of both ends. So an attacker between the two cannot terminate the connection in place of one of
them.
"""

import hashlib
import os
import ssl
import tempfile
from datetime import datetime

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

ALWAYS = datetime(2000, 1, 1), datetime(9999, 12, 31)
"""Validity of the certificate, which is not checked: the certificate lives only as long as its
process."""


class TlsIdentity:
    """TLS contexts for the connections of one process. Versions below 1.3 are refused."""

    def __init__(self) -> None:
        self.server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        for context in (self.server, self.client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
        self.server.num_tickets = 0  # A resumed session would not be bound to the certificate.
        self.client.check_hostname = False
        self.client.verify_mode = (
            ssl.CERT_NONE
        )  # TLS proves the certificate's key; the handshake proves its owner.
        self.certificate = _load_new_certificate(self.server)
        """Hash of this process's certificate, which the handshake of each connection that it
        accepts covers."""


def hash_certificate(der: bytes | None) -> str:
    """Return the hash of a certificate, in hexadecimal digits. `der`: the other side's
    certificate in binary form, from `ssl`.
    """
    return hashlib.sha256(der or b"").hexdigest()


def _load_new_certificate(context: ssl.SSLContext) -> str:
    """Create a key and a certificate signed with it, load both into `context`, and return the
    certificate's hash.
    """
    from cryptography import x509  # Imported here, because it is slow and few commands need it.

    key = Ed25519PrivateKey.generate()
    nobody = x509.Name([])
    builder = x509.CertificateBuilder(
        nobody, nobody, key.public_key(), x509.random_serial_number(), *ALWAYS
    )
    certificate = builder.sign(key, None)
    pem = serialization.Encoding.PEM
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # OpenSSL reads keys only from files. This file is readable by this user only, and is removed
    # immediately.
    descriptor, path = tempfile.mkstemp()
    try:
        with open(descriptor, "wb") as file:
            file.write(certificate.public_bytes(pem) + secret)
        context.load_cert_chain(path)
    finally:
        os.unlink(path)
    return hash_certificate(certificate.public_bytes(serialization.Encoding.DER))

"""A switch in user space that delays every frame, for kernels without netem. It has nothing to do
with libp2p relays.

namespaces.py starts it in the bridge's namespace, in place of the bridge. Each line `NUMBER DEVICE
SECONDS` on stdin adds a port and is answered with the number. The process ends when stdin closes. A
frame from port i to port j leaves SECONDS of i plus SECONDS of j after it was read. A frame holds
up to 64 kB of one TCP stream and keeps the kernel's offload header. That keeps the number of frames
small enough for Python.
"""

import contextlib
import heapq
import itertools
import os
import select
import socket
import time
from dataclasses import dataclass, field

ETH_P_ALL = 3
SOL_PACKET = 263
PACKET_VNET_HDR = 15
PACKET_IGNORE_OUTGOING = 23
SO_SNDBUFFORCE = 32
SO_RCVBUFFORCE = 33
BUFFER_BYTES = 1 << 25
OFFLOAD_HEADER = 10
MAX_FRAME = OFFLOAD_HEADER + 14 + 65536
MAX_LINE = 4096
MAX_READ = 64
"""Frames read from one port before the other ports are served."""
LATE_SECONDS = 0.00025
"""Time in which a virtual machine wakes up to read and send a frame. The delay is reduced by it."""
ADDRESS_PREFIX = bytes.fromhex("02000ad500")


@dataclass
class Switch:
    """The ports by number, the delay in seconds that each adds, and the frames in flight."""

    ports: dict[int, socket.socket] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    """A heap of (time of departure, serial number, port, frame)."""
    serial: "itertools.count[int]" = field(default_factory=itertools.count)

    def add(self, number: int, device: str, seconds: float) -> None:
        """Add a port."""
        self.ports[number] = open_raw_socket(device)
        self.seconds[number] = seconds

    def read(self, number: int) -> None:
        """Read the frames that a port has received and queue them."""
        port = self.ports[number]
        with contextlib.suppress(BlockingIOError):
            for _ in range(MAX_READ):
                frame = port.recv(MAX_FRAME, socket.MSG_TRUNC)
                read_at = time.monotonic() - LATE_SECONDS
                if len(frame) < MAX_FRAME:
                    for to in destinations(frame, number, self.ports):
                        due = read_at + self.seconds[number] + self.seconds[to]
                        heapq.heappush(self.waiting, (due, next(self.serial), to, frame))

    def send_due(self) -> float | None:
        """Send all frames that are due.

        Return the seconds until the next one is; None if no frame waits.
        """
        while self.waiting:
            left = self.waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, number, frame = heapq.heappop(self.waiting)
            # When the port's queue is full the frame is lost, as on any link.
            with contextlib.suppress(OSError):
                self.ports[number].send(frame)
        return None

    def run(self) -> None:
        """Serve until stdin closes."""
        while True:
            numbers = {port.fileno(): number for number, port in self.ports.items()}
            ready, _, _ = select.select([*numbers, 0], [], [], self.send_due())
            for descriptor in ready:
                if descriptor in numbers:
                    self.read(numbers[descriptor])
                elif not self.read_command():
                    return

    def read_command(self) -> bool:
        """Execute one command from stdin. Return False if stdin is closed."""
        # The launcher waits for each answer, so one read returns exactly one line.
        line = os.read(0, MAX_LINE)
        if not line:
            return False
        number, device, seconds = line.decode().split()
        self.add(int(number), device, float(seconds))
        os.write(1, f"{number}\n".encode())
        return True


def open_raw_socket(device: str) -> socket.socket:
    """Open a packet socket that receives and sends the frames of a device."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((device, ETH_P_ALL))
    return port


def link_layer_address(number: int) -> str:
    """Return the link-layer address (locally administered) of the interface at a port's far end."""
    return (ADDRESS_PREFIX + bytes([number])).hex(":")


def destinations(frame: bytes, source: int, ports: dict[int, socket.socket]) -> list[int]:
    """Return the ports for a frame: all others for a broadcast, none for an unknown address."""
    address = frame[OFFLOAD_HEADER : OFFLOAD_HEADER + 6]
    if address[:5] == ADDRESS_PREFIX:
        return [address[5]] if address[5] in ports and address[5] != source else []
    return (
        [number for number in ports if number != source] if address[:1] and address[0] & 1 else []
    )


def main() -> None:
    """Run the switch with real-time priority, because a frame that waits for a processor is delayed
    too long.
    """
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    Switch().run()


if __name__ == "__main__":
    main()

"""A switch in user space that holds every frame for a while: the delay of links where the kernel has no netem.

It runs in the namespace of the bridge, in whose place it is (`diloco/netns.py` starts it): ports are added by lines on
stdin, `NUMBER DEVICE SECONDS`, each answered by its number; it ends with stdin. A frame from port i to port j leaves
SECONDS of i plus SECONDS of j after it was read. Frames come as the kernel has them, up to 64 kB of one TCP stream in
one, with the offload header that lets them leave as such: that is what makes Python fast enough.
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
"""Frames read from a port before others have their turn."""
LATE_SECONDS = 0.00025
"""How late a frame is read and sent, on a virtual machine, because waking up takes time: taken off its delay."""
ADDRESS_PREFIX = bytes.fromhex("02000ad500")


@dataclass
class Switch:
    """Its ports by number, how long each adds to a frame's way, and the frames on their way."""

    ports: dict[int, socket.socket] = field(default_factory=dict)
    seconds: dict[int, float] = field(default_factory=dict)
    waiting: list[tuple[float, int, int, bytes]] = field(default_factory=list)
    """A heap: when it leaves, a serial number, its port, the frame."""
    serial: "itertools.count[int]" = field(default_factory=itertools.count)

    def add(self, number: int, device: str, seconds: float) -> None:
        """Carry the frames of one more port."""
        self.ports[number] = opened(device)
        self.seconds[number] = seconds

    def read(self, number: int) -> None:
        """Take in what a port has received."""
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
        """Send what is due; seconds until the next is, None when nothing waits."""
        while self.waiting:
            left = self.waiting[0][0] - time.monotonic()
            if left > 0:
                return left
            _, _, number, frame = heapq.heappop(self.waiting)
            # The port's queue is full: the frame is lost, as on any link.
            with contextlib.suppress(OSError):
                self.ports[number].send(frame)
        return None

    def run(self) -> None:
        """Until stdin ends."""
        while True:
            numbers = {port.fileno(): number for number, port in self.ports.items()}
            ready, _, _ = select.select([*numbers, 0], [], [], self.send_due())
            for descriptor in ready:
                if descriptor in numbers:
                    self.read(numbers[descriptor])
                elif not self.obey():
                    return

    def obey(self) -> bool:
        """Do what a line on stdin says; False when there will be no more."""
        line = os.read(0, MAX_LINE)  # whoever writes waits for the answer: it is one line
        if not line:
            return False
        number, device, seconds = line.decode().split()
        self.add(int(number), device, float(seconds))
        os.write(1, f"{number}\n".encode())
        return True


def opened(device: str) -> socket.socket:
    """A socket with what the device receives, which sends by it."""
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    port.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    port.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    port.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, BUFFER_BYTES)
    port.setsockopt(socket.SOL_SOCKET, SO_SNDBUFFORCE, BUFFER_BYTES)
    port.setblocking(False)
    port.bind((device, ETH_P_ALL))
    return port


def address_of(number: int) -> str:
    """The link-layer address (locally administered) of the interface at the other end of a port."""
    return (ADDRESS_PREFIX + bytes([number])).hex(":")


def destinations(frame: bytes, source: int, ports: dict[int, socket.socket]) -> list[int]:
    """The ports that a frame leaves by: all others if it is for all, none if it is for nobody here."""
    address = frame[OFFLOAD_HEADER : OFFLOAD_HEADER + 6]
    if address[:5] == ADDRESS_PREFIX:
        return [address[5]] if address[5] in ports and address[5] != source else []
    return [number for number in ports if number != source] if address[:1] and address[0] & 1 else []


def main() -> None:
    """Relay ahead of all that trains: a frame that waits for a processor would be on a longer link."""
    with contextlib.suppress(PermissionError):
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    Switch().run()


if __name__ == "__main__":
    main()

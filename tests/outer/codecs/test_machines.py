"""Payloads and values are equal on machines with any vector units, with or without flushed
denormals.
"""

import os
import subprocess
import sys

import torch

torch.set_num_threads(1)

BYTES_OF_FIXED_PARTS = """
import hashlib, torch
from outer.codecs import build_codec
from outer.config import CodingConfig
torch.set_flush_denormal({flush})
bits = torch.arange(1, 40_000, dtype=torch.int64).mul(2654435761).bitwise_and(0xFFFFFFFF)
raw = bits.to(torch.uint8)
is_denormal = (bits >> 23 & 255) == 0
is_finite = (bits >> 23 & 255) != 255
values = torch.where(bits >= 2**31, bits - 2**32, bits).to(torch.int32).view(torch.float32)
denormals, values = values[is_denormal], values[is_finite]
size = values.abs()
parts = [values, values[size < 1e-20], values[size < 1e20], values[size < 3e-37]]
small = values[(values.abs() < 2) & (values.abs() > 1e-3)]
mixed = torch.cat([small[:700], small[:700] * 1e-3 - 1e-4, -small[:900] * 1e30])
parts += [small, mixed, denormals]
names = ("fp32", "bf16", "fp16", "int8", "int4", "e3m0", "stat2", "topk")
codecs = [build_codec(name) for name in names]
codecs.append(build_codec("int4", CodingConfig(rounding="stochastic")))
codecs.append(build_codec("topk", CodingConfig(value_bits=8)))
def digest(tensor):
    return hashlib.sha256(tensor.numpy()).hexdigest()
for number, codec in enumerate(codecs):
    for part in parts:
        payload = codec.encode(part)
        print(number, codec.name, digest(payload), digest(codec.decode(payload, part.numel())))
codec = build_codec("lowrank")
for scale in (2.0**-120, 1e-9, 1e20):
    payload = raw[: codec.num_bytes(20_000)].clone()
    payload[:4].view(torch.float32).fill_(scale)
    print("lowrank", digest(codec.decode(payload, 20_000)))
"""


def test_bytes_and_values_do_not_depend_on_vector_units_or_denormal_mode() -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", BYTES_OF_FIXED_PARTS.format(flush=flush)],
            env=os.environ | {"ATEN_CPU_CAPABILITY": capability, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for capability, flush in (("default", False), ("avx2", True))
    ]
    outputs = [process.communicate(timeout=180)[0].splitlines() for process in processes]
    assert len(outputs[0]) == 10 * 7 + 3
    assert outputs[0] == outputs[1]

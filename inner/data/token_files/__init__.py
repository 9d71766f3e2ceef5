"""Token files that other programs have written, mapped into memory without conversion:
`data.source: tokens`.

NAME.bin + NAME.idx            Megatron-LM, NeMo (and datatrove's export for them)
NAME.ds + NAME.ds.index        datatrove, nanotron
NAME.npy                       OLMo (ids without a header), or an array saved by numpy
"""

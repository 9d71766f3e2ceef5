"""Token files that other programs have written, mapped into memory as they are: `data.source: tokens`.

NAME.bin + NAME.idx            Megatron-LM, NeMo (and what datatrove writes for them)
NAME.ds + NAME.ds.index        datatrove, nanotron
NAME.npy                       OLMo (ids without a header), or an array that numpy has saved
"""

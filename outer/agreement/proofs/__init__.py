"""Proofs that a state was committed: the signed yes votes of its participants, and whose signatures
count.
"""

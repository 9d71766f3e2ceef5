"""`diloco simulate --virtual`: many islands on modelled machines and links, on a virtual clock.

The islands run the real outer loop: agreement, reduce, transfers, leases and failure detection.
Three things are modelled: the time that inner steps take, the links, and the model, for which a
stand-in with one number per payload is trained.
"""

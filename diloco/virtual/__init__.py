"""`diloco simulate --virtual`: many islands on modelled machines and links, on a clock that waits for nobody.

The islands run the real outer loop: agreement, reduce, transfers, leases and failure detection. What is modelled is the
time that inner steps take, the links, and the model, of which a stand-in of one number for each payload is trained.
"""

"""Coverage-guided fuzzing (atheris, libFuzzer) of everything that decodes bytes from a peer.

    scripts/fuzz                                      # sets up .fuzz, and fuzzes every group in
                                                      turn
    .fuzz/bin/python -m tests.fuzz codecs --executions 1000000

entries.py says what a decoder is here, groups.py lists all of them by group, judge.py what must
hold of each input. drive.py lets atheris make the inputs, with the mutations of mutator.py.
test_replay.py plays the inputs that are kept in corpus/ again in the default suite, and
test_everything_is_fuzzed.py finds decoders that nobody fuzzes.
"""

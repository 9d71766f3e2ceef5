"""`diloco plan` and `diloco mesh`: predict what a run costs from its config, and what would make it
cheaper.
"""

"""`diloco mesh`: show the ranks of an island, their traffic, memory and time, before anything
runs.
"""

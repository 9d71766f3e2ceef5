"""Input from other people: it is opened without waiting, limited before it is read, and refused
with its name.
"""

"""What an island does around its rounds: it sets the learning rate, records, evaluates, saves and
goes back.
"""

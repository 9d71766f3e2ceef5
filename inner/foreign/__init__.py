"""What others have written: opened without waiting, bounded before it is read, and refused by name."""

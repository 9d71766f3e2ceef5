"""`diloco plan`: what a run would cost, from its config alone, and what would make it cheaper."""

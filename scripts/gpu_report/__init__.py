"""A report on the trainer on a machine with GPUs: `python -m scripts.gpu_report`, see
__main__.py.
"""

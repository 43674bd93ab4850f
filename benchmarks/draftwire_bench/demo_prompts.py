"""Prompts for the demo pair, which continues Python."""

PROMPTS = [
    'def read_lines(path):\n    """Returns the lines of a text file, without their line ends."""\n',
    "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
    "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(",
    'def is_prime(n):\n    """Returns True when n is a prime number."""\n    if n < 2:\n',
    "import unittest\n\n\nclass TestQueue(unittest.TestCase):\n    def test_empty(self):\n",
]

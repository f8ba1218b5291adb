#!/usr/bin/env python3
"""Which variant is right and which is fastest on each shape: python benchmarks/hot_shapes.py --help"""

import sys

from metalmm.bench.hot_shapes import main

if __name__ == "__main__":
    sys.exit(main())

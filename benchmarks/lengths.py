"""Save the sample lengths of `paceline bench data`. Usage: python benchmarks/lengths.py OUT.npy [SAMPLES]"""

import sys

import numpy as np

from paceline.bench.lengths import SAMPLES, run_lengths

np.save(sys.argv[1], run_lengths(int(sys.argv[2]) if len(sys.argv) > 2 else SAMPLES))

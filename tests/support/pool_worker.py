"""A worker of the pool: `python pool_worker.py ADDRESS PORT`, where the pool and its store are."""

import sys

from pool import work

if __name__ == "__main__":
    work(sys.argv[1], int(sys.argv[2]))

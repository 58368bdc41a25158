"""Started by torchrun: `fsla`, on ranks that wait for rank 0 as long as it takes."""

from fsla.__main__ import main
from fsla.distributed import _join as joining
from launch import LIMIT_S

if __name__ == "__main__":
    joining.SPEAKS_S = LIMIT_S
    main()

"""How a process that was a gloo rank ends."""

import os
import sys
from typing import NoReturn

import torch.distributed as dist


def leave() -> NoReturn:
    """End a rank that has done its work, without Python's own end.

    A sharded model holds on to its group, so gloo's threads outlive `destroy_process_group`; one that wants
    the interpreter while it ends makes C++ abort ("terminate called without an active exception").
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

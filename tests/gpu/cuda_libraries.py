#!/usr/bin/env python3
"""Folders with CUDA's libraries that Python packages brought along, joined by colons.

For LD_LIBRARY_PATH: the nvidia-* wheels keep cuBLASLt, NCCL and others below site-packages/nvidia,
where no loader looks.
"""
import glob
import os
import site
import sys

WANTED = ("libcublasLt.so.*", "libcublas.so.*", "libnccl.so.*", "libnvrtc.so.*", "libnvJitLink.so.*")


def folders():
    roots = [path for path in sys.path + site.getsitepackages() if path]
    for root in dict.fromkeys(os.path.realpath(path) for path in roots):
        for pattern in WANTED:
            for depth in ("*/lib", "*/*/lib"):
                for found in glob.glob(os.path.join(root, "nvidia", depth, pattern)):
                    yield os.path.dirname(found)


print(":".join(dict.fromkeys(folders())))

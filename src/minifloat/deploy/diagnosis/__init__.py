"""`doctor`: what this machine and this installation have, what is missing, what that costs, and what fits here.

    machine.py    processor, kernels, memory, disk, threads and limits of control groups
    gpu.py        GPUs and their driver
    packages.py   versions, extras, engines in this environment and on PATH, versions with known problems
    fit.py        which engine and which scheme suit this machine
    examination.py  doctor and its result, with what to do

Every part is examined without starting an engine. Only the OpenMP runtime needs torch, which is imported for it.
"""

from minifloat.deploy.diagnosis.examination import Diagnosis, doctor

__all__ = ["Diagnosis", "doctor"]

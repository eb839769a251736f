"""Estimate of a train step's time on a TPU, from the compiled HLO text.

Step time = Σ estimated_cycles × executions / clock over the scheduled instructions, plus the Mosaic kernels
(kernels.py). Collectives have no cycles and are not included. README.md in this folder discusses the accuracy.
"""

from __future__ import annotations

import collections
import re
from typing import Any

from jaxlm.analysis.costs import hbm_bytes, product_flops
from jaxlm.analysis.hlo import Module
from jaxlm.analysis.kernels import kernel_cost, kernel_key
from jaxlm.analysis.step import Estimate, Kernels, Operation
from jaxlm.parallel.peaks import tpu_generation


def estimate(module: Module, device: Any) -> Estimate | None:
    """Estimate the time of a compiled step on a TPU, or return None for a chip of unknown clock."""
    chip = tpu_generation(device)
    if chip is None:
        return None
    executed, kernel_seconds = product_flops(module), 0.0
    operations: dict[str, Operation] = collections.defaultdict(Operation)
    is_counted: dict[str, bool] = {}
    for computation, runs in module.executions(fused=False).items():
        instructions = module.computations[computation]
        for instruction in instructions:
            name = re.sub(r"\d+", "#", instruction.op_name or f"({instruction.opcode})")
            seconds = instruction.cycles / chip.clock
            if instruction.is_kernel:
                cost = kernel_cost(instruction, instructions, device)
                is_counted[kernel_key(instruction)] = cost.is_counted
                name, seconds = f"kernel {name}{'' if cost.is_counted else ' (charged)'}", cost.seconds
                executed += runs * cost.flops
                kernel_seconds += runs * seconds
            if seconds:
                before = operations[name]
                operations[name] = Operation(before.seconds + runs * seconds, before.executions + runs)
    counted = sum(is_counted.values())
    return Estimate(
        sum(operation.seconds for operation in operations.values()), executed, hbm_bytes(module),
        "the TPU compiler's cycles", Kernels(kernel_seconds, counted, len(is_counted) - counted), dict(operations),
    )

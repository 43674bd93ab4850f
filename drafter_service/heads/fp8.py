"""Products of a head in 8 bits: half the bytes of weights, and twice the rate of a GPU's matrix units.

Drafts change speed, never output, so a head may be less precise than the target. Each weight and each input has one
scale. Inputs are outputs of root-mean-square norms: their largest possible value is known, so no step computes a scale.
Products with other inputs keep the head's dtype.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from drafter_service.heads.operations import LARGEST_FP8, quantise
from draftwire.contract.errors import CheckpointError, InvalidArgumentError

# The matrix units need sizes that are multiples of 16.
_MULTIPLE = 16
_LEAST_CAPABILITY = (8, 9)


class Fp8Product:
    """x @ weight.T in float8 e4m3, with float32 sums.

    Attributes:
        weight: [out, in] float8.
    """

    def __init__(self, weight: torch.Tensor, largest_input: float) -> None:
        """
        Args:
            weight: [out, in].
            largest_input: Upper bound of the inputs' absolute values.

        Raises:
            CheckpointError: If the sizes are not multiples of 16.
        """
        if any(size % _MULTIPLE for size in weight.shape):
            raise CheckpointError(
                f"quantization = 'fp8' needs weights whose sizes are multiples of {_MULTIPLE}; the head has one of "
                f"{list(weight.shape)}"
            )
        scale = max(float(weight.abs().max()), torch.finfo(torch.float32).tiny) / LARGEST_FP8
        self.weight = quantise(weight, scale)
        self._input_scale = largest_input / LARGEST_FP8
        self._scales = [torch.tensor(one, device=weight.device) for one in (self._input_scale, scale)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product with x [T, in], [T, out] in the dtype of x."""
        of_input, of_weight = self._scales
        return F.scaled_mm(
            quantise(x, self._input_scale),
            self.weight.T,
            of_input,
            ScalingType.TensorWise,
            of_weight,
            ScalingType.TensorWise,
            output_dtype=x.dtype,
        )


def check_device(device: torch.device) -> None:
    """Check that the device has products of float8.

    Raises:
        InvalidArgumentError: If it has none.
    """
    if device.type != "cuda":
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < _LEAST_CAPABILITY:
        given, least = (".".join(map(str, one)) for one in (capability, _LEAST_CAPABILITY))
        allowed = f"needs a GPU of compute capability {least} or newer, or a CPU; {device} has {given}; allowed: none"
        raise InvalidArgumentError("quantization", "fp8", allowed)

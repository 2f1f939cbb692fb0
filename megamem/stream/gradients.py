"""Weight gradients of a stream: summed over chunks, handed to autograd once.

Data-parallel hooks must fire once per micro-batch and parameter: firing per chunk races with `overlap_grad_reduce` and
gives silently wrong gradients (DESIGN section 3.1).
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor, nn


class GradientSums:
    """Weight gradients summed over chunks in at least fp32, into megatron-core's `main_grad` where there is one."""

    def __init__(self) -> None:
        self._sums: dict[nn.Parameter, Tensor] = {}

    def backward(
        self,
        outputs: Sequence[Tensor],
        grads: Sequence[Tensor],
        inputs: Sequence[Tensor],
        parameters: Sequence[nn.Parameter],
        added: Sequence[nn.Parameter] = (),
    ) -> tuple[Tensor, ...]:
        """Gradients of `inputs`; those of `parameters` are added to the sums, each as soon as it exists.

        (All weight gradients of a chunk together would outweigh its activations.)

        Args:
            added: more parameters, whose linear layers add to `main_grad` themselves (`adding_weights`).
        """

        def absorb(parameter: nn.Parameter) -> Callable[[Tensor], Tensor]:
            def hook(grad: Tensor) -> Tensor:
                self.add(parameter, grad)
                return grad.new_zeros(()).expand_as(grad)

            return hook

        handles = [parameter.register_hook(absorb(parameter)) for parameter in parameters]
        for parameter in added:  # megatron-core makes a dummy gradient, as large as the weight, for one with this mark
            del parameter.grad_added_to_main_grad
        try:
            return torch.autograd.grad(outputs, [*inputs, *parameters], grads)[: len(inputs)]
        finally:
            for parameter in added:
                parameter.grad_added_to_main_grad = False
            for handle in handles:
                handle.remove()

    def add(self, parameter: nn.Parameter, grad: Tensor) -> None:
        """Add one chunk's gradient."""
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            main.add_(grad)
        elif parameter in self._sums:
            self._sums[parameter].add_(grad)
        else:
            self._sums[parameter] = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)

    def add_product(self, parameter: nn.Parameter, dy_UV: Tensor, x_UH: Tensor, block: int = 4096) -> None:
        """Add `dy^T x`, the gradient of a matrix `[V, H]`, without a temporary of its size (a head's is large)."""
        total = self._total(parameter)
        if total.dtype == dy_UV.dtype:
            total.addmm_(dy_UV.t(), x_UH)
            return
        for begin in range(0, total.size(0), block):
            total[begin : begin + block].add_(dy_UV[:, begin : begin + block].t() @ x_UH)

    def add_rows(self, parameter: nn.Parameter, index_T: Tensor, grad_TH: Tensor) -> None:
        """Add to rows of a matrix `[V, H]`: the gradient of a lookup, without a matrix of zeros for it."""
        total = self._total(parameter)
        total.index_add_(0, index_T, grad_TH.to(total.dtype))

    def _total(self, parameter: nn.Parameter) -> Tensor:
        total = getattr(parameter, "main_grad", None)
        if total is None:
            if parameter not in self._sums:
                wide = torch.promote_types(parameter.dtype, torch.float32)
                self._sums[parameter] = torch.zeros_like(parameter, dtype=wide)
            total = self._sums[parameter]
        return total

    def hand_out(self, parameter: nn.Parameter) -> Tensor:
        """What autograd gets, once.

        Where the sum is in `main_grad` already, megatron-core is told so by its own mark and does not read the value:
        a view of that buffer stands in, since a dummy of a head's size would be the peak of a step. (But the gradient
        of a tied embedding is read, mark or not: autograd adds its other part. It gets zeros.)
        """
        main = getattr(parameter, "main_grad", None)
        if main is not None:
            parameter.grad_added_to_main_grad = True
            if getattr(parameter, "zero_out_wgrad", False):
                return torch.zeros_like(parameter)
            return main.flatten().view(parameter.dtype)[: parameter.numel()].view_as(parameter)
        found = self._sums.pop(parameter, None)
        return torch.zeros_like(parameter) if found is None else found.to(parameter.dtype)

    def as_root(self, parameters: Sequence[nn.Parameter], device: torch.device) -> Tensor:
        """A scalar whose backward hands the sums to `parameters` through autograd, so that their hooks fire."""
        return _HandOut.apply(torch.zeros((), device=device), self, *parameters)


class _HandOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx, zero: Tensor, sums: GradientSums, *parameters: nn.Parameter) -> Tensor:
        ctx.sums, ctx.parameters = sums, parameters
        return zero.clone()

    @staticmethod
    def backward(ctx, _):
        return None, None, *[ctx.sums.hand_out(p) for p in ctx.parameters]


def adding_weights(modules: Iterable[nn.Module | None]) -> list[nn.Parameter]:
    """Weights of megatron-core's linear layers that add their gradient to `main_grad` in their backward."""
    linears = [m for module in modules if module is not None for m in module.modules()]
    return [m.weight for m in linears if getattr(m, "gradient_accumulation_fusion", False) and m.weight.requires_grad]


def expect_plain_gradients(output: Tensor, parameters: Iterable[nn.Parameter]) -> Tensor:
    """Lift megatron-core's mark "already in `main_grad`" before plain gradients of `parameters` arrive; returns output.

    The mark outlives the micro-batch that set it: without this, a short row after a streamed one would be ignored.
    """
    if output.requires_grad:
        marked = [p for p in parameters if hasattr(p, "main_grad")]

        def lift(grad: Tensor) -> None:
            for parameter in marked:
                parameter.grad_added_to_main_grad = False

        output.register_hook(lift)
    return output

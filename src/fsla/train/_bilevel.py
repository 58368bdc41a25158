"""What the algorithms of the front end share: the variables, their optimisers, the start, and what is saved.

ω, the model's own parameters, moves by ∂_ω G; v, a copy of their form, by H v - ∂_ω F, so that it tracks H⁻¹ ∂_ω F; λ,
the outer modules' parameters, by d, which estimates ∂_λ F - J v. Each is a gradient in `.grad` for a torch optimiser.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fsla._checks import pick, positive, whole_number
from fsla._tree import Tree, axpy, norm, scale, sub
from fsla.problems._autograd import Mode
from fsla.problems._batches import Sample
from fsla.problems._nest import copied, map_tensors
from fsla.problems._problem import checked
from fsla.steps._automatic import EVERY, FIRST, Curvature, Damping, Gate, ScaleFree, zeros
from fsla.train._data_parallel import Batches
from fsla.train._guard import CHECK_EVERY, GROWTH, KEEP_EVERY, DivergenceError, Guard, RollbackWarning, StepInfo
from fsla.train._module import ModelProblem, OuterModules, products_of
from fsla.train._module_views import ModelLoss
from fsla.train._optimizers import Maker, descend, made, plain, warn_of_decay, with_decay

FORMAT = 1
OPTIMIZERS = ("inner_optimizer", "adjoint_optimizer", "outer_optimizer")


class BilevelOptimizer(ABC):
    """What the three algorithms share.

    Args:
        model: the network; its trainable parameters are the inner variable, and move in place.
        outer: the modules with the hyper-parameters: a module or parameter, or a list or mapping of these.
        inner_loss, outer_loss: called as ``loss(model, outer, batch)``; they return 0-d tensors. `outer` is what was
            given here.
        inner_optimizer, adjoint_optimizer, outer_optimizer: what moves ω, v and λ: a torch optimiser (for v, whose
            tensors are made here, a function such as ``functools.partial(torch.optim.SGD, lr=0.1)``, which may be
            given for all three). By default ω and v move by 1/L, and λ by `fsla.steps.ScaleFree`.
        products: "exact", "difference" (of first-order gradients), or "auto": exact where the model is small and
            allows it.
        autocast_dtype: torch.bfloat16 for bfloat16 passes; the variables stay as they are.
        max_grad_norm: clips ∂_ω G to this norm.
        max_adjoint_norm: keeps ‖v‖ under this bound.
        batches: on several ranks, as torchrun starts them: "whole" where each is given the same batch, and takes its
            part; "shares" where each is given samples of its own, as many on each.
        max_rollbacks: how often a run that diverges goes back to its last good state and halves its steps before it
            raises; None watches nothing. The state is kept on the device: a second copy of what is trained, of v and of
            the optimisers' states, 16 bytes a parameter under Adam in float32. 0 and None keep none.
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        *,
        inner_loss: ModelLoss,
        outer_loss: ModelLoss,
        inner_optimizer: Maker = None,
        adjoint_optimizer: Maker = None,
        outer_optimizer: Maker = None,
        products: Mode = "auto",
        autocast_dtype: torch.dtype | None = None,
        max_grad_norm: float | None = None,
        max_adjoint_norm: float | None = None,
        batches: Batches = "whole",
        max_rollbacks: int | None = 3,
    ) -> None:
        pick(products, {"auto": 0, "exact": 0, "difference": 0}, "kind of products")
        pick(batches, {"whole": 0, "shares": 0}, "kind of batches")
        positive(max_grad_norm, "max_grad_norm", type(self).__name__, optional=True)
        positive(max_adjoint_norm, "max_adjoint_norm", type(self).__name__, optional=True)
        if max_rollbacks is not None:
            whole_number(max_rollbacks, "max_rollbacks", type(self).__name__, least=0)
        mode = products_of(model, products)
        self.problem = ModelProblem(
            model, outer, inner_loss, outer_loss, mode=mode, autocast_dtype=autocast_dtype, batches=batches
        )
        self.problem.meet({"algorithm": type(self).__name__, "products": products, "batches": batches})
        here = self.problem.here
        self.adjoint = zeros(here.omega)
        self._curvature = Curvature(here.omega) if inner_optimizer is None or adjoint_optimizer is None else None
        self._damping = Damping()
        self._gate = Gate(here.omega) if outer_optimizer is None else None
        given = (inner_optimizer, adjoint_optimizer, outer_optimizer)
        self._own = {name: maker is None for name, maker in zip(OPTIMIZERS, given, strict=True)}
        self.inner_optimizer = made(inner_optimizer, self.problem.omega, "inner_optimizer", plain)
        self.adjoint_optimizer = made(adjoint_optimizer, self.adjoint, "adjoint_optimizer", plain)
        self.outer_optimizer = made(outer_optimizer, self.problem.lam, "outer_optimizer", ScaleFree)
        self._max_grad_norm = max_grad_norm
        self._max_adjoint_norm = max_adjoint_norm
        self._guard = Guard(max_rollbacks)
        self.step_count = 0
        self._d: Tree | None = None
        self._good: dict[str, Any] | None = None
        warn_of_decay(self.inner_optimizer)

    @property
    def hypergradient(self) -> Tree:
        """d, the estimate of ∇f that λ moves by, by the outer parameters' names."""
        if self._d is None:
            raise RuntimeError("There is no hypergradient before the first step. Call step(inner_batch, outer_batch).")
        return self._d

    @property
    def param_groups(self) -> Any:
        raise AttributeError(
            "There are three optimisers here: attach schedulers to .inner_optimizer, .adjoint_optimizer or "
            ".outer_optimizer. A GradScaler is not supported: steps that it skips are steps that v does not know of. "
            "Use autocast_dtype=torch.bfloat16, which needs none."
        )

    def step(
        self,
        inner_batch: Any,
        outer_batch: Any = None,
        *,
        fresh: tuple[Any, Any] | None = None,
        seed: int | None = None,
    ) -> StepInfo:
        """Moves λ, ω and v once, in place.

        Args:
            inner_batch, outer_batch: what the two losses are given: anything, or `MicroBatches` of it.
            fresh: two more batches for the direction of λ, which STORM needs.
            seed: fixes what random layers draw, in all passes alike; by default drawn from torch's generator.
        """
        seed = int(torch.randint(2**62, ())) if seed is None else seed
        if self.step_count == 0:
            self._begin(inner_batch, outer_batch, seed)
        self.problem.track()
        info = self._step(inner_batch, outer_batch, fresh, seed)
        self.step_count += 1
        looks = (
            self._curvature is not None and self.step_count % (EVERY if self.step_count > FIRST else EVERY // 2) == 0
        )
        if (looks or self.step_count == 1 or self.step_count % CHECK_EVERY == 0) and not self._is_well(info):
            return info
        if self._curvature is not None and looks:
            self._curvature.look(self.problem.inner_at(self.problem.here, inner_batch, seed).hvp)
            self._set_rates()
        return info

    def state_dict(self) -> dict[str, Any]:
        """All but the parameters of the model and of outer, as torch's optimisers have it."""
        return {
            "format": FORMAT,
            "algorithm": type(self).__name__,
            "step_count": self.step_count,
            "adjoint": {name: p.detach() for name, p in self.adjoint.items()},
            "d": self._d,
            "guard": self._guard.state_dict(),
            "damping": self._damping.size,
            "curvature": None if self._curvature is None else self._curvature.state_dict(),
            "gate": None if self._gate is None else self._gate.state_dict(),
            **{name: getattr(self, name).state_dict() for name in OPTIMIZERS},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a run up where `state_dict` left it; load the model and outer as well."""
        for key, mine in (("format", FORMAT), ("algorithm", type(self).__name__)):
            if state.get(key) != mine:
                raise ValueError(f"The state must be of the {key} {mine!r}. Got {state.get(key)!r} instead.")
        shapes = {name: tuple(t.shape) for name, t in state["adjoint"].items()}
        if shapes != {name: tuple(p.shape) for name, p in self.adjoint.items()}:
            raise ValueError("The state must be of a model with the same parameters, and is of another one.")
        device = next(iter(self.adjoint.values())).device
        state = map_tensors(lambda t: t.detach().to(device, copy=True), dict(state))
        for key, part in (("curvature", self._curvature), ("gate", self._gate)):
            if (state[key] is None) != (part is None):
                raise ValueError(f"The state must be of a run with the same optimisers given; {key} differs.")
            if part is not None:
                part.load_state_dict(state[key])
        self.step_count = state["step_count"]
        with torch.no_grad():
            for name, p in self.adjoint.items():
                p.copy_(state["adjoint"][name])
        self._d = state["d"]
        self._guard.load_state_dict(state["guard"])
        self._damping.size = state["damping"]
        for name in OPTIMIZERS:
            getattr(self, name).load_state_dict(state[name])

    # ---------------------------------------------------------------------------------------------- for the algorithms

    @abstractmethod
    def _step(self, inner_batch: Any, outer_batch: Any, fresh: tuple[Any, Any] | None, seed: int) -> StepInfo:
        """Moves all three variables, and leaves the next d."""

    @abstractmethod
    def _first_direction(self, inner_batch: Any, outer_batch: Any, seed: int) -> Tree:
        """d before the first step."""

    def _move_lam(self, d: Tree) -> None:
        if isinstance(self.outer_optimizer, ScaleFree) and self._gate is not None:
            self.outer_optimizer.gate = self._gate.size * self._guard.caution
        descend(self.outer_optimizer, self.problem.lam, d)

    def _move_omega(self, gradient: Tree) -> None:
        if self._max_grad_norm is not None:
            gradient = scale((self._max_grad_norm / norm(gradient).clamp(min=self._max_grad_norm)), gradient)
        descend(self.inner_optimizer, self.problem.omega, gradient)

    def _move_v(self, hv: Tree, b: Tree) -> None:
        v = self._v
        hv = with_decay(hv, v, self.inner_optimizer, self.problem.omega)
        if self._own["adjoint_optimizer"]:
            hv = axpy(self._damping.look(v, hv), v, hv)
        residual = sub(hv, b)
        if self._gate is not None:
            self._gate.look(scale(-1.0, residual), b)
        if self._own["adjoint_optimizer"] and self._curvature is not None:
            residual = scale(self._curvature.share(v, hv), residual)
        descend(self.adjoint_optimizer, self.adjoint, residual)
        if self._max_adjoint_norm is not None:
            v = self._v
            shrink = self._max_adjoint_norm / norm(v).clamp(min=self._max_adjoint_norm)
            with torch.no_grad():
                for p in self.adjoint.values():
                    p.mul_(shrink)

    @property
    def _v(self) -> Tree:
        return {name: p.detach() for name, p in self.adjoint.items()}

    def _info(self, inner_loss: Tensor, outer_loss: Tensor) -> StepInfo:
        assert self._d is not None
        curvature = None if self._curvature is None else self._curvature.size
        gate = None if self._gate is None else self._gate.size
        return StepInfo(self.step_count, inner_loss, outer_loss, norm(self._d), norm(self._v), curvature, gate)

    # ------------------------------------------------------------------------------------------------- start and guard

    def _begin(self, inner_batch: Any, outer_batch: Any, seed: int) -> None:
        problem = self.problem
        xi = Sample.full(inner_batch, outer_batch)._replace(seed=seed)
        checked(problem, problem.here, xi)
        problem.check_reading(inner_batch, seed)
        if self._curvature is not None:
            self._curvature.look(problem.inner_at(problem.here, inner_batch, seed).hvp, FIRST)
            self._set_rates()
        self._d = self._first_direction(inner_batch, outer_batch, seed)
        self._keep()

    def _set_rates(self) -> None:
        assert self._curvature is not None
        size = self._curvature.size
        if not 0 < size < math.inf:
            raise ValueError(
                f"The inner loss must have curvature, from which the steps follow. Its Hessian times a direction is "
                f"{size}. Give optimisers with rates of your own, or add a penalty on the parameters to the inner loss."
            )
        for name in OPTIMIZERS[:2]:
            if self._own[name]:
                for group in getattr(self, name).param_groups:
                    group["lr"] = self._guard.caution / size

    def _is_well(self, info: StepInfo) -> bool:
        """Goes back where the run diverged; else keeps its state now and then."""
        bad = self.problem.together.ranks.from_first(self._guard.look(info))
        if bad:
            self._roll_back(bad, self._guard.max_rollbacks or 0)
        elif (self.step_count % KEEP_EVERY == 0 or self.step_count == CHECK_EVERY) and not self._guard.doubts:
            self._keep()
        return not bad

    def _keep(self) -> None:
        if self._guard.max_rollbacks:
            state = {"tensors": self.problem.moving(), "state": self.state_dict()}
            self._good = copied(state, into=self._good)

    def _roll_back(self, what: str, left: int) -> None:
        text = f"The run diverged at step {self.step_count}: {what} not finite or {GROWTH:g} times as large as before."
        caution = self._guard.caution / 2
        if self._good is None or left == 0:
            raise DivergenceError(
                f"{text} Try a smaller rate where you gave one, a penalty on the parameters in the inner loss (v needs "
                "curvature), max_adjoint_norm=, or products='exact'."
            )
        with torch.no_grad():
            for t, kept in zip(self.problem.moving(), self._good["tensors"], strict=True):
                t.copy_(kept)
        self.load_state_dict(self._good["state"])
        self._guard.caution = caution
        self._guard.max_rollbacks = left - 1
        for name in OPTIMIZERS:
            if not self._own[name]:
                for group in getattr(self, name).param_groups:
                    group["lr"] = group["lr"] / 2
        if self._curvature is not None:
            self._set_rates()
        self._keep()
        if self.problem.together.ranks.is_first:
            warnings.warn(
                f"{text} It goes on from step {self.step_count} with steps half as long; {left - 1} such rollbacks are "
                "left.",
                RollbackWarning,
                stacklevel=4,
            )

"""Any bilevel algorithm on any model, in place.

bilevel = fsla.SOBA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss, inner_optimizer=optimizer)
info = bilevel.step(train_batch, trusted_batch)
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, replace
from typing import Any, Literal, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fsla._checks import number, pick, positive, whole_number
from fsla._state_tree import describe, evolve, flatten, map_tensors, unflatten
from fsla._storage._json_values import differences
from fsla._tree import Tree, clone, copy_, norm
from fsla.algorithms._base import Algorithm, State
from fsla.algorithms._registry import get_algorithm, list_algorithms
from fsla.algorithms._single_loop import fsla as fsla_algorithm
from fsla.algorithms._soba import ma_soba, soba
from fsla.distributed._reducer import ClosureReducer, DataParallelReducer
from fsla.problems import _passes as passes
from fsla.problems._autograd import HvpMethod
from fsla.problems._batches import Batch, StepBatches, mix_seed
from fsla.problems._module import ClosureProblem, ModuleLoss, ModuleProblem, OuterModules, detached
from fsla.problems._views import Oracles, Point, ProblemAtPoint
from fsla.problems._wrappers import DampedProblem, RidgeProblem
from fsla.steps._automatic import Automatic
from fsla.steps._projections import Ball
from fsla.steps._schedules import Scaled, Scheduled
from fsla.steps._updates import (
    Clipped,
    LeaveInGrad,
    Projection,
    ScaledUpdate,
    Shortened,
    Variable,
    projected,
    with_innermost,
)
from fsla.train._captured import Recorder
from fsla.train._cost import describe_cost, toy_step
from fsla.train._guard import Guard, StepInfo
from fsla.train._optimizers import (
    NAMES,
    OptimizerFactory,
    build_optimizer,
    describe_mover,
    in_place,
    optimizer_state,
    set_optimizer_state,
    warn_of_decay,
)
from fsla.train._rank_setup import join_ranks
from fsla.train._schema import check_like, check_nest, check_saved
from fsla.train._solve import solve_inner
from fsla.train._step_graphs import StepGraphs

FORMAT = 1


class BilevelOptimizer(ProblemAtPoint):
    """Any bilevel algorithm on a model, an adjoint and outer modules, in place. It is no `torch.optim.Optimizer`.

    Args:
        model: the network; its trainable parameters are the inner variable ω, and move in place.
        outer: the hyper-parameters λ: a module or parameter, or a list or mapping of these. A parameter that lies
            inside the model is λ, and ω is the rest.
        inner_loss: called as ``inner_loss(model, outer, batch)``; returns a 0-d tensor. `outer` is the same object.
            Without losses `backward` takes closures.
        outer_loss: of the same form.
        algorithm: an object such as ``fsla.algorithms.stocbio(fsla.steps.constant(0.1, 0.1, 0.1))``, or the name of one
            whose step sizes are automatic. "one_step" is the baseline without an adjoint.
        inner_optimizer: torch optimiser of ω, or a function of parameters that makes one, such as
            ``functools.partial(torch.optim.SGD, lr=0.1)``. Without one ω moves by the algorithm's step sizes.
        adjoint_optimizer: function that makes the optimiser of v, whose tensors the class creates.
        outer_optimizer: torch optimiser of λ, or a function that makes one. While v moves by automatic steps, λ takes
            the share `outer_step_scale` of each step: little until v and ω have converged.
        outer_every: λ and v move at one step in each block of this length. The other steps are plain training.
        projection: set that λ stays in, such as ``fsla.steps.Box(0, 1)``.
        hvp_method: "autograd" (exact), "finite_difference" (of first-order gradients), or "auto": exact if the model is
            small and allows it.
        autocast_dtype: torch.bfloat16 for bfloat16 passes; the variables stay as they are. Without losses it says what
            the closures compute in.
        outer_uses_lam: whether the outer loss reads `outer`; by default the first pass over each batch finds out.
        max_grad_norm: norm that ∂_ω G is clipped to.
        max_adjoint_norm: bound on ‖v‖.
        split_batches: on several ranks, True if each receives the same batch, and takes its part. False if each
            receives different samples, the same number on each.
        engine: "eager" takes each step from Python. "graph" captures steps as CUDA graphs and replays them, which pays
            if kernels are short; it needs batches on the GPU, losses that are functions of their arguments, and no
            random layers. "auto" is "graph" if that is possible, with a warning if it is not. A number that a loss
            reads from elsewhere is captured as it is. Replays are compared with the step itself at first, and at one
            step in 512.
        max_rollbacks: how often a run that diverges goes back to its last good state and halves its steps before it
            raises; None watches nothing. The state stays on the device: a second copy of what is trained, of v and of
            the optimisers' states, 16 bytes a parameter under Adam in float32. 0 and None store none.

    Raises:
        TypeError: if an argument is unknown, or the algorithm cannot move a module.
        ValueError: if a number is out of range, or an optimiser has other parameters.

    Examples:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> bilevel = fsla.BilevelOptimizer(
        ...     model,
        ...     weights,
        ...     inner_loss=inner_loss,
        ...     outer_loss=outer_loss,
        ...     algorithm="aid_cg",
        ...     inner_optimizer=optimizer,
        ... )
        >>> info = bilevel.step(train, trusted)
        >>> print(bilevel)
        BilevelOptimizer(
            algorithm: aid_cg
            inner: 3 parameters, moved by SGD(lr=0.1)
            adjoint: none
            outer: 2 parameters, moved by ScaleFree with automatic step sizes
            cost: 11 gradients and 11 passes for second derivatives
        )
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        *,
        inner_loss: ModuleLoss | None = None,
        outer_loss: ModuleLoss | None = None,
        algorithm: Algorithm[Any] | str = "soba",
        inner_optimizer: OptimizerFactory = None,
        adjoint_optimizer: OptimizerFactory = None,
        outer_optimizer: OptimizerFactory = None,
        outer_every: int = 1,
        projection: Projection | None = None,
        hvp_method: HvpMethod = "auto",
        autocast_dtype: torch.dtype | None = None,
        outer_uses_lam: bool | None = None,
        max_grad_norm: float | None = None,
        max_adjoint_norm: float | None = None,
        split_batches: bool = True,
        engine: Literal["eager", "graph", "auto"] = "eager",
        max_rollbacks: int | None = 3,
        **unknown: Any,
    ) -> None:
        owner = type(self).__name__
        _refuse_unknown(owner, unknown)
        positive(max_grad_norm, "max_grad_norm", owner, optional=True)
        positive(max_adjoint_norm, "max_adjoint_norm", owner, optional=True)
        whole_number(outer_every, "outer_every", owner)
        if max_rollbacks is not None:
            whole_number(max_rollbacks, "max_rollbacks", owner, least=0)
        self._name = _name(self, algorithm)
        algorithm = _with_options(_resolve(algorithm), outer_every, projection, moves_v=adjoint_optimizer is not None)
        if algorithm.finite_differences:  # The problem takes them, so that the ridge of weight decay is added outside.
            hvp_method = "finite_difference"
            algorithm = replace(algorithm, finite_differences=False)
        self._owns_losses = _both_losses(owner, inner_loss, outer_loss)
        network = model if isinstance(model, nn.Module) else None
        if inner_loss is None or outer_loss is None:
            closures = ClosureReducer(network)
            self.reducer: DataParallelReducer = closures
            self._problem: ModuleProblem = ClosureProblem(model, outer, autocast_dtype=autocast_dtype, reducer=closures)
        else:
            self.reducer = DataParallelReducer(network, split_batches=split_batches)
            self._problem = ModuleProblem(
                model,
                outer,
                inner_loss,
                outer_loss,
                hvp_method=hvp_method,
                outer_uses_lam=outer_uses_lam,
                autocast_dtype=autocast_dtype,
                reducer=self.reducer,
            )
        self._make_optimizers((inner_optimizer, adjoint_optimizer, outer_optimizer))
        self._max_grad_norm = max_grad_norm
        self.algorithm = self._placed(algorithm, max_adjoint_norm)
        self._graphs = self._step_graphs(engine)
        self._guard = Guard(max_rollbacks)
        self.step_count = 0
        self.state: State | None = None
        """Where the run is; None before the first step on which λ and v move."""
        self._seed: int | None = None
        """From which the seeds of all batches follow but those of inner ones; None before the first step."""
        self._good: dict[str, Any] | None = None
        """The last good state."""
        settings = {"algorithm": describe(algorithm), "hvp_method": hvp_method, "split_batches": split_batches}
        join_ranks(self._problem, self.reducer, settings)

    def _make_optimizers(self, arguments: tuple[OptimizerFactory, ...]) -> None:
        """Set the torch optimisers, and note which ones this class built."""
        omega, lam = self._problem.omega, self._problem.lam
        adjoint = {} if arguments[1] is None else {name: nn.Parameter(torch.zeros_like(p)) for name, p in omega.items()}
        self._v_parameters: dict[str, nn.Parameter] = adjoint
        optimizers = [
            build_optimizer(one, parameters, name)
            for one, parameters, name in zip(arguments, (omega, adjoint, lam), NAMES, strict=True)
        ]
        self.inner_optimizer, self.adjoint_optimizer, self.outer_optimizer = optimizers
        self._optimizers = {name: one for name, one in zip(NAMES, optimizers, strict=True) if one is not None}
        self._built = [
            name
            for name, one in zip(NAMES, arguments, strict=True)
            if one is not None and not isinstance(one, torch.optim.Optimizer)
        ]
        if self.inner_optimizer is not None:
            warn_of_decay(self.inner_optimizer)

    def _placed(self, algorithm: Algorithm[Any], max_adjoint_norm: float | None) -> Algorithm[Any]:
        """The algorithm with updates that write into the parameters."""
        problem, updates, clip = self._problem, algorithm.updates, self._max_grad_norm
        inner = in_place(updates.inner, self.inner_optimizer, problem.omega)
        adjoint = in_place(updates.adjoint, self.adjoint_optimizer, self._v_parameters)
        sizes = algorithm.step_sizes
        if isinstance(sizes, Automatic):
            sizes = replace(
                sizes,
                inner=self.inner_optimizer is None and self._owns_losses,
                adjoint=self.adjoint_optimizer is None,
                outer=self.outer_optimizer is None,
                wait=sizes.wait and (self.outer_optimizer is None or self.adjoint_optimizer is None),
            )
        outer = in_place(updates.outer, self.outer_optimizer, problem.lam)
        if self.outer_optimizer is not None and isinstance(sizes, Automatic) and sizes.wait:
            outer = with_innermost(outer, Shortened)
        return replace(
            algorithm,
            step_sizes=sizes,
            inner_update=inner if clip is None else Clipped(clip, inner),
            adjoint_update=projected(adjoint, None if max_adjoint_norm is None else Ball(max_adjoint_norm)),
            outer_update=outer,
            projection=None,  # It is in `outer_update` already.
        )

    def _step_graphs(self, engine: str) -> StepGraphs | None:
        """What captures steps, where that was asked for; raises where they cannot be captured."""
        pick(engine, dict.fromkeys(("eager", "graph", "auto")), "engine")
        device = passes.device_of(self._problem.omega)
        refused = None
        if device.type != "cuda":
            refused = f"it replays CUDA graphs, and the model is on {device}."
        elif not self.algorithm.capturable:
            refused = f"{self._name} does not take the same operations at every step."
        elif self.reducer.several:
            refused = "the model is trained by several processes."
        elif not self._owns_losses:
            refused = "the passes of `backward` belong to the loop that calls."
        if engine == "graph" and refused:
            raise ValueError(f"engine='graph' is unavailable: {refused} Use engine='eager' or 'auto'.")
        if engine == "eager" or refused:
            return None
        optimizers = list(self._optimizers.values())
        recorder = Recorder(device, pool=torch.cuda.graph_pool_handle())
        return StepGraphs(self._problem, optimizers, self._info, engine == "auto", recorder)

    # -------------------------------------------------------------------------------------------------- what users read

    @property
    def model(self) -> nn.Module:
        """The model."""
        return self._problem.model

    @property
    def outer(self) -> OuterModules:
        """The argument `outer`."""
        return self._problem.outer

    @property
    def adjoint(self) -> Tree:
        """v, which tracks H⁻¹ ∂_ω F, by the model's parameter names; {} where the algorithm keeps none."""
        return {} if self.state is None else self.state.v

    @property
    def hypergradient(self) -> Tree:
        """d, the estimate of ∇f that λ moves by, by the outer parameters' names."""
        if self.state is None:
            raise RuntimeError("There is no hypergradient before the first step. Call step(inner_batch, outer_batch).")
        return clone(self.state.direction) if self._graphs else self.state.direction

    @property
    def due(self) -> bool:
        """Whether the next step moves v and λ."""
        return self.algorithm.due(self.step_count)

    @property
    def param_groups(self) -> NoReturn:
        raise AttributeError(
            "There are three optimisers here: attach schedulers to .inner_optimizer, .adjoint_optimizer or "
            ".outer_optimizer. GradScaler is not supported because it skips steps without updating the adjoint. "
            "Use autocast_dtype=torch.bfloat16, which needs none."
        )

    @property
    def reads_independent_batches(self) -> bool:
        """Whether the direction of λ needs independent batches, as STORM's does."""
        return self.algorithm.looks_back

    def __repr__(self) -> str:
        algorithm, problem = self.algorithm, self._problem
        updates, sizes = algorithm.updates, algorithm.step_sizes
        counts, toy = toy_step(algorithm, by_differences=problem.hvp_method == "finite_difference")
        omega, lam = (f"{sum(p.numel() for p in x.values()):,} parameters" for x in (problem.omega, problem.lam))
        by = describe_mover(self.inner_optimizer, updates.inner, sizes)
        v = describe_mover(self.adjoint_optimizer, updates.adjoint, sizes)
        lines = [
            f"algorithm: {self._name}",
            f"inner: {omega}, moved by {by if self._owns_losses or self.inner_optimizer else 'the loop that calls'}",
            f"adjoint: moved by {v}" if toy.v else "adjoint: none",
            f"outer: {lam}, moved by {describe_mover(self.outer_optimizer, updates.outer, sizes)}",
            f"cost: {describe_cost(counts, algorithm.outer_every)}",
        ]
        return f"{type(self).__name__}(\n" + "".join(f"    {line}\n" for line in lines) + ")"

    def problem_at_point(self) -> tuple[Oracles, Point]:
        """Return the problem and the present point, for `fsla.check_hypergradient`."""
        return RidgeProblem(self._problem, self._decay), self._problem.point()

    # ------------------------------------------------------------------------------------------------------------ steps

    def step(
        self,
        inner_batch: Any,
        outer_batch: Any = None,
        *,
        independent_batches: tuple[Any, Any] | None = None,
        seed: int | None = None,
    ) -> StepInfo:
        """Move λ, ω and v once, in place.

        If a loss raises, or Ctrl-C interrupts it, buffers and random states are as before the step. So are λ and ω
        under an algorithm that asks for everything at one point, such as SOBA. FSLA may have moved them.

        Args:
            inner_batch: argument of the inner loss: anything, or `MicroBatches` of it.
            outer_batch: argument of the outer loss. From an iterator a batch is drawn when λ moves, and not before; if
                ω has no optimiser, the first step draws one too.
            independent_batches: an inner and an outer batch for the direction of λ alone, which STORM needs.
            seed: fixes what random layers draw. By default the inner batch draws from torch's own stream, which goes
                on as in plain training, and other batches draw from seeds that follow from it.

        Returns:
            What the step saw.

        Raises:
            TypeError: if the optimizer has no losses.
            DivergenceError: if the run diverges and no rollback is left.
        """
        if not self._owns_losses:
            raise TypeError(
                "step needs inner_loss= and outer_loss=. Without them use backward(inner_closure, outer_closure) and "
                "the step of your own optimiser."
            )
        return self.advance(self._batches(inner_batch, outer_batch, independent_batches, seed, owned=True))

    def advance(self, batches: StepBatches) -> StepInfo:
        """Move λ, ω and v once, on batches that are named one by one: for algorithms that read several of a kind.

        Args:
            batches: the batches.

        Returns:
            What the step saw.
        """
        return self._move(self._algorithm_now, batches, owned=True)

    def backward(self, inner: Any, outer: Any = None, *, seed: int | None = None) -> Tensor:
        """Take the place of ``loss.backward()``: add to `.grad` of the model, and move v and λ if that is due.

        The model itself does not move: the optimiser of the calling loop moves it. ``step(a, b)`` is ``backward(a,
        b)``, then ``inner_optimizer.step()`` and ``zero_grad()``. Pass `inner_optimizer` to the constructor too, so
        that v knows the curvature of its weight decay. If a loss raises, or Ctrl-C interrupts it, nothing has moved.

        Args:
            inner: an inner batch. Without losses, a closure that goes forward and backward and returns its loss. It is
                called once on plain steps, twice on those where λ moves, and more often on the first one, each time on
                one batch.
            outer: an outer batch, or a closure. From an iterator a batch is drawn when λ moves.
            seed: as in `step`.

        Returns:
            The inner loss, without a graph.

        Raises:
            TypeError: if the algorithm asks after the model has moved, or `max_grad_norm` was passed.
        """
        if not self.algorithm.at_one_point:
            raise TypeError(
                "backward needs an algorithm that asks for everything at one point, such as SOBA or MA-SOBA, since "
                f"the model moves outside of it. {self._name} asks after the model has moved; use step."
            )
        if isinstance(self.inner_optimizer, torch.optim.LBFGS):
            raise TypeError(
                "backward cannot serve LBFGS, which calls its closure itself, several times a step. Use an optimiser "
                "that reads .grad, such as torch.optim.AdamW."
            )
        if self._max_grad_norm is not None:
            raise TypeError("max_grad_norm is for step. Clip the gradients between backward and the optimiser's step.")
        algorithm = replace(self._algorithm_now, inner_update=LeaveInGrad(self._problem.omega))
        info = self._move(algorithm, self._batches(inner, outer, None, seed, owned=False), owned=False)
        assert info.inner_loss is not None
        return info.inner_loss

    def _move(self, algorithm: Algorithm[Any], batches: StepBatches, *, owned: bool) -> StepInfo:
        """Take a step; `owned` is a loop in which ω moves here."""
        with self._problem.undone_on_failure():
            if self._begins(owned):
                self._begin(algorithm, batches, owned=owned)
            if self.state is None:
                info = self._info(None, self._train(algorithm, batches))
            else:
                info = self._advance(algorithm, self.state, batches, owned=owned)
        self.step_count += 1
        if self._is_well(algorithm, info, owned=owned) and self.state is not None:
            self.state = algorithm.measure(self._problem_with_decay, self.state, batches)
        return info

    def _begins(self, owned: bool) -> bool:
        """Whether the run begins with this step: λ moves, or the automatic steps of ω must be known."""
        return self.state is None and (self.due or (owned and self.inner_optimizer is None))

    def _begin(self, algorithm: Algorithm[Any], batches: StepBatches, *, owned: bool) -> None:
        self._problem.check_reads_lam(batches.inner_grad[0])
        state = algorithm.init(self._problem_with_decay, self._problem.point(), batches)
        self.state = replace(state, step_count=self.step_count)
        self._keep(owned=owned)

    def _train(self, algorithm: Algorithm[Any], batches: StepBatches) -> tuple[Tensor | None, None]:
        """Move ω alone, before the run begins; return the losses."""
        point = self._problem.point()
        view = self._problem.inner_at(point, batches.inner_grad[0], update_buffers=True)
        algorithm.updates.inner(Variable(point.omega), view.grad_omega, 1.0)
        return view.known_value, None

    def _advance(self, algorithm: Algorithm[Any], state: State, batches: StepBatches, *, owned: bool) -> StepInfo:
        """Take a step of the algorithm from the present parameters; return what it saw."""
        if self._graphs and self._graphs.active and owned:
            self.state, info = self._graphs.advance(
                algorithm, self._problem_with_decay, state, batches, self._at_parameters
            )
            return info
        self.state, context = algorithm.advance(self._problem_with_decay, self._at_parameters(state), batches)
        return self._info(self.state, context.losses())

    def _at_parameters(self, state: State) -> State:
        """The state with λ and ω in the parameters, whose storage may be another one by now."""
        point = self._problem.point()
        return evolve(state, lam=Variable(point.lam, state.lam.memory), omega=Variable(point.omega, state.omega.memory))

    @property
    def _problem_with_decay(self) -> Oracles:
        """The problem with the curvature of weight decay, which is a ridge that an optimiser adds to the inner loss."""
        decay = self._decay
        return DampedProblem(self._problem, decay) if decay else self._problem

    @property
    def _decay(self) -> Mapping[str, float]:
        return self.algorithm.updates.inner.weight_decay

    @property
    def _algorithm_now(self) -> Algorithm[Any]:
        """The algorithm with steps as long as rollbacks have left them; automatic ones know that themselves."""
        algorithm, guard = self.algorithm, self._guard
        sizes = algorithm.step_sizes
        if guard.outer_step_scale < 1.0 and self.outer_optimizer is None:
            algorithm = replace(algorithm, outer_update=ScaledUpdate(guard.outer_step_scale, algorithm.updates.outer))
        if guard.step_scale < 1.0 and isinstance(sizes, Scheduled):
            algorithm = replace(algorithm, step_sizes=Scaled(sizes, guard.step_scale))
        return algorithm

    def _batches(
        self, inner: Any, outer: Any, independent: tuple[Any, Any] | None, seed: int | None, *, owned: bool
    ) -> StepBatches:
        """The batches of a step. Without a seed the inner batch draws from torch's own stream."""
        if seed is not None:
            whole_number(seed, "seed", type(self).__name__, least=-(2**63))
        outer = self._drawn(outer, owned)
        base = self._own_seed() if seed is None else seed
        inner_batch = Batch(inner, None if seed is None else mix_seed(base, 0, 0))
        outer_batch = Batch(outer, mix_seed(base, 1, 0))
        inner_of_lam, outer_of_lam, mode = inner_batch, outer_batch, "shared"
        if independent is not None:
            mode = "grouped"
            inner_of_lam = Batch(independent[0], mix_seed(base, 4, 0))
            outer_of_lam = Batch(independent[1], mix_seed(base, 3, 0))
        return StepBatches(
            (inner_batch,), (outer_batch,), (inner_batch,), (outer_of_lam,), (inner_of_lam,), seed=base, mode=mode
        )

    def _drawn(self, outer: Any, owned: bool) -> Any:
        """The outer batch, drawn where it is an iterator and the step reads it."""
        if isinstance(outer, DataLoader):
            raise TypeError(
                "outer_batch must be a batch or an iterator of batches. Got a DataLoader; make an endless iterator of "
                "it, once, with fsla.problems.cycle(loader)."
            )
        if not isinstance(outer, Iterator):
            return outer
        if not (self.due or self._begins(owned)):
            return None
        try:
            return next(outer)
        except StopIteration:
            raise ValueError(
                "The iterator of outer batches has ended. fsla.problems.cycle(loader) makes an endless one."
            ) from None

    def _own_seed(self) -> int | None:
        """The seed of this step, from one that follows from torch's random state when the run begins."""
        if self._seed is None:
            self._seed = self.reducer.process_group.broadcast(_seed_from_stream())
        return mix_seed(self._seed, 0, self.step_count)

    def _info(self, state: State | None, losses: tuple[Tensor | None, Tensor | None]) -> StepInfo:
        """What the present step saw. Never asks the host."""
        sizes = self.algorithm.step_sizes
        zero = torch.zeros(())
        curvature = scale = None
        if state is not None and state.measured is not None and isinstance(sizes, Automatic):
            curvature = state.measured.curvature if sizes.measures else None
            scale = sizes.outer_scale(state.measured) if sizes.outer or sizes.wait else None
        return StepInfo(
            self.step_count,
            *losses,
            zero if state is None else norm(state.direction),
            zero if state is None or not state.v else norm(state.v),
            curvature,
            scale,
        )

    def solve(self, batch: Any, *, max_iter: int = 1000, tol: float | None = None) -> float:
        """Train the model to convergence on a batch at the present weights, to judge them.

        Args:
            batch: argument of the inner loss: all of the data, or `MicroBatches` of it.
            max_iter: the most iterations of L-BFGS.
            tol: size of the gradient, relative to 1 + ‖ω‖, at which it has converged; by default 1e-6 in float64 and
                1e-4 in other arithmetic.

        Returns:
            The inner loss.
        """
        return solve_inner(*self.problem_at_point(), self._problem.omega, batch, max_iter=max_iter, tol=tol)

    # ---------------------------------------------------------------------------------------------------- saved and set

    @property
    def identity(self) -> Any:
        """What a run is a run of, as JSON: a saved state is refused by any other."""
        return {
            "optimizer": type(self).__name__,
            "algorithm": describe(self.algorithm),
            "omega": {name: _form(p) for name, p in self._problem.omega.items()},
            "lam": {name: _form(p) for name, p in self._problem.lam.items()},
            "hvp_method": self._problem.hvp_method,
            "autocast_dtype": str(self._problem.autocast_dtype),
            "split_batches": self.reducer.split_batches,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return all but the parameters of the model and of outer, as a plain dict that `torch.save` writes.

        It holds the states of the optimisers that this class created, not of those that were passed to it.
        """
        return self._saved(self._built)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Set what `state_dict` returned; load the model and outer as well.

        Args:
            state: the dict.

        Raises:
            ValueError: if the state is of another run; then nothing is set.
        """
        self._load(state, self._built)

    def run_state(self) -> dict[str, Any]:
        """Return `state_dict` with all optimisers, and the state to roll back to: what `fit` saves."""
        return {"state": self._saved(self._optimizers), "good": self._good}

    def set_run_state(self, saved: Mapping[str, Any]) -> None:
        """Set what `run_state` returned."""
        good = saved["good"]
        if good is not None:
            tensors, names = self._watched(good["owned"])
            check_like("the state to go back to", good["tensors"], tensors)
            self._checked(good["state"], names)
        self._load(saved["state"], self._optimizers)
        self._good = good

    def select_hvp_method(self, inner_batch: Any) -> None:
        """Decide how products are computed, as a run does at its start."""
        self._problem.select_mode(self._problem.point(), Batch(inner_batch, seed=0))

    def _saved(self, names: Iterable[str]) -> dict[str, Any]:
        """The state, with that of the optimisers of these names."""
        state = self.state
        if state is not None:  # λ and ω are saved with outer and the model.
            state = replace(state, lam=Variable({}, state.lam.memory), omega=Variable({}, state.omega.memory))
        nest = {
            "step_count": self.step_count,
            "seed": self._seed,
            "guard": self._guard.state_dict(),
            "state": state,
            "optimizers": {name: optimizer_state(self._optimizers[name]) for name in names},
        }
        tensors, json = flatten(nest)
        return {"format": FORMAT, "run": self.identity, "tensors": tensors, "json": json}

    def _load(self, state: Mapping[str, Any], names: Iterable[str]) -> None:
        nest = self._checked(state, names)
        self.step_count = nest["step_count"]
        self._seed = nest["seed"]
        self._guard.load_state_dict(nest["guard"])
        for name in names:
            set_optimizer_state(self._optimizers[name], nest["optimizers"][name])
        self.state = None if nest["state"] is None else self._at_home(nest["state"])

    def _checked(self, state: Mapping[str, Any], names: Iterable[str]) -> Any:
        """The nest of a saved state; raises if it is of another run."""
        check_saved(state, FORMAT)
        differ = differences(state["run"], self.identity)
        if differ:
            raise ValueError(f"Cannot load state of another run ({'; '.join(differ[:8])}).")
        try:
            nest = unflatten({path: t.detach().clone() for path, t in state["tensors"].items()}, state["json"], Mapping)
        except ValueError as error:
            raise ValueError(f"Cannot load state: {error}.") from None
        algorithm, problem = self.algorithm, self._problem
        check_nest(nest, algorithm.step_sizes, problem.lam, problem.omega, self._optimizers, algorithm.updates)
        missing = [name for name in names if name not in nest["optimizers"]]
        if missing:
            raise ValueError(
                f"Cannot load state: it does not hold {', '.join(missing)}. It was saved where the optimiser itself "
                "was given, and not a function that makes it."
            )
        return nest

    def _at_home(self, state: State) -> State:
        """A loaded state on the device of ω, with v in the parameters that its optimiser moves."""
        device = passes.device_of(self._problem.omega)
        state = map_tensors(lambda t: t if t.dtype == torch.uint8 else t.to(device), state)
        changed: dict[str, Any] = {}
        for f in fields(state) if self._v_parameters else ():
            variable = getattr(state, f.name)
            if isinstance(variable, Variable) and variable.value:  # λ and ω are saved without a value.
                home = detached(self._v_parameters)
                copy_(list(home.values()), [variable.value[name] for name in home])
                changed[f.name] = Variable(home, variable.memory)
        return self._at_parameters(replace(state, **changed))

    # ------------------------------------------------------------------------------------------------------------ guard

    def _is_well(self, algorithm: Algorithm[Any], info: StepInfo, *, owned: bool) -> bool:
        """Go back where the run diverged; else keep its state now and then. True where it did not, as far as seen."""
        measures = self.state is not None and algorithm.products_due(info.step, self.state) > 0
        lost = not owned and self._guard.is_lost(info)  # At once: the next gradient of the model would be lost too.
        if not lost and not self._guard.is_due(info.step, measures=measures):
            return True
        seen = self._guard.observe(info), self._guard.stays_high(info)
        diverged, stays_high = self.reducer.process_group.broadcast(seen)
        if diverged:
            self._roll_back(diverged, owned=owned)
        elif stays_high and self._guard.shorten(info.step):
            self._halve_lr(NAMES[2:])
        elif self._guard.should_keep(info.step):
            self._keep(owned=owned)
        return not diverged

    def _watched(self, owned: bool) -> tuple[list[Tensor], list[str]]:
        """The tensors and the optimisers that a rollback sets: all that moves, or λ and v alone in others' loops."""
        names = list(self._optimizers)
        if owned:
            return self._problem.moving(), names
        return list(detached(self._problem.lam).values()), [name for name in names if name != NAMES[0]]

    def _keep(self, *, owned: bool) -> None:
        if self._guard.max_rollbacks:
            tensors, names = self._watched(owned)
            snapshot = {"owned": owned, "tensors": tensors, "state": self._saved(names)}
            self._good = self._guard.copy(snapshot, into=self._good)

    def _roll_back(self, diverged: str, *, owned: bool) -> None:
        """Set the last good state and halve the steps; in others' loops λ alone goes back, and v begins anew."""
        good, step = self._good, self.step_count
        if good is None or (owned and not good["owned"]):
            raise self._guard.divergence(diverged, step)
        left = self._guard.begin_rollback(diverged, step)
        step_scale, reported = self._guard.step_scale / 2, self._guard.rise.reported
        tensors, names = self._watched(owned)
        copy_(tensors, good["tensors"][: len(tensors)])
        self._load(good["state"], names)
        if not owned:
            self._begin_adjoint(step)
        self._guard.halved(step_scale, left)
        self._guard.rise.reported = reported
        self._halve_steps(step_scale, names)
        self._keep(owned=owned)
        if self.reducer.process_group.is_first:
            self._guard.warn(diverged, step, self.step_count, left, owned=owned)

    def _begin_adjoint(self, step: int) -> None:
        """Begin v anew at this step."""
        self.step_count = step
        if self.state is not None:
            v = list(self.state.v.values())
            copy_(v, [torch.zeros_like(t) for t in v])
            self.state = replace(self.state, step_count=step)

    def _halve_lr(self, names: Iterable[str]) -> None:
        """Halve the steps of these torch optimisers, where they exist."""
        for name in names:
            for group in self._optimizers[name].param_groups if name in self._optimizers else ():
                group["lr"] = group["lr"] / 2

    def _halve_steps(self, step_scale: float, names: Iterable[str]) -> None:
        self._halve_lr(names)
        if self.state is not None and self.state.measured is not None:
            measured = self.state.measured
            measured = replace(measured, step_scale=torch.full_like(measured.step_scale, step_scale))
            self.state = replace(self.state, measured=measured)


class FSLA(BilevelOptimizer):
    """Algorithm 1 of the paper: λ moves by d, then ω and v at the old ω, then d is taken at the new point.

    Args:
        model: the network.
        outer: the hyper-parameters.
        momentum: momentum of d: "none", "average" or "storm".
        new_grad_weight: weight of the new gradient in d, if it has a momentum.
        adjoint_at: whether v moves at the "old_params", as in the algorithm, or at the "new_params", for one gradient
            more.
        options: those of `BilevelOptimizer`.

    Examples:
        >>> bilevel = fsla.FSLA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss)
        >>> info = bilevel.step(train, trusted)
        >>> sorted(bilevel.adjoint)
        ['bias', 'weight']
    """

    def __init__(
        self,
        model: nn.Module,
        outer: OuterModules,
        *,
        momentum: Literal["none", "average", "storm"] = "none",
        new_grad_weight: float = 0.1,
        adjoint_at: Literal["old_params", "new_params"] = "old_params",
        **options: Any,
    ) -> None:
        number(new_grad_weight, "new_grad_weight", "FSLA", low=0.0, high=1.0)
        algorithm = fsla_algorithm(Automatic(new_grad_weight=new_grad_weight), momentum=momentum, adjoint_at=adjoint_at)
        super().__init__(model, outer, algorithm=algorithm, **_without_algorithm("FSLA", options))


class SOBA(BilevelOptimizer):
    """ω, v and λ move at once, from one inner and one outer batch: the cheapest step. Start with it.

    Args:
        model: the network.
        outer: the hyper-parameters.
        options: those of `BilevelOptimizer`.

    Examples:
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> bilevel = fsla.SOBA(
        ...     model, weights, inner_loss=inner_loss, outer_loss=outer_loss, inner_optimizer=optimizer, outer_every=4
        ... )
        >>> for _ in range(200):
        ...     info = bilevel.step(train, trusted)
        >>> weights.as_dict()["a"] > weights.as_dict()["b"]
        True
    """

    def __init__(self, model: nn.Module, outer: OuterModules, **options: Any) -> None:
        super().__init__(model, outer, algorithm=soba(), **_without_algorithm("SOBA", options))


class MASOBA(BilevelOptimizer):
    """SOBA whose λ moves by a moving average of its directions, one step late.

    Args:
        model: the network.
        outer: the hyper-parameters.
        new_grad_weight: weight of the new gradient in the average.
        options: those of `BilevelOptimizer`.

    Examples:
        >>> bilevel = fsla.MASOBA(model, weights, inner_loss=inner_loss, outer_loss=outer_loss)
        >>> info = bilevel.step(train, trusted)
        >>> bilevel.step_count
        1
    """

    def __init__(self, model: nn.Module, outer: OuterModules, *, new_grad_weight: float = 0.1, **options: Any) -> None:
        number(new_grad_weight, "new_grad_weight", "MASOBA", low=0.0, high=1.0)
        algorithm = ma_soba(Automatic(new_grad_weight=new_grad_weight))
        super().__init__(model, outer, algorithm=algorithm, **_without_algorithm("MASOBA", options))


def _without_algorithm(owner: str, options: dict[str, Any]) -> dict[str, Any]:
    if "algorithm" in options:
        raise TypeError(f"{owner} is an algorithm. Use fsla.BilevelOptimizer(..., algorithm=...) for another one.")
    return options


def _name(optimizer: BilevelOptimizer, algorithm: Algorithm[Any] | str) -> str:
    """What its user calls the algorithm."""
    if type(optimizer) is not BilevelOptimizer:
        return type(optimizer).__name__
    return algorithm if isinstance(algorithm, str) else type(algorithm).__name__


def _both_losses(owner: str, inner_loss: object, outer_loss: object) -> bool:
    """Whether there are losses: both or neither."""
    if (inner_loss is None) != (outer_loss is None):
        raise TypeError(f"{owner} takes both inner_loss= and outer_loss=, or neither where backward takes closures.")
    return inner_loss is not None


def _resolve(algorithm: Algorithm[Any] | str) -> Algorithm[Any]:
    if isinstance(algorithm, Algorithm):
        return algorithm
    if not isinstance(algorithm, str):
        raise TypeError(
            "algorithm must be an algorithm, such as fsla.algorithms.soba(), or its name. "
            f"Got {type(algorithm).__name__}."
        )
    pick(algorithm, dict.fromkeys(list_algorithms()), "algorithm")
    factory: Callable[..., Algorithm[Any]] = get_algorithm(algorithm)
    needed = [p.name for p in inspect.signature(factory).parameters.values() if p.default is inspect.Parameter.empty]
    if needed:
        raise TypeError(
            f"algorithm={algorithm!r} has no automatic step sizes: it needs {', '.join(needed)}. Pass an object, such "
            f"as fsla.algorithms.{algorithm}(fsla.steps.constant(outer_lr, inner_lr, adjoint_lr), ...)."
        )
    return factory()


def _with_options(
    algorithm: Algorithm[Any], outer_every: int, projection: Projection | None, *, moves_v: bool
) -> Algorithm[Any]:
    """The algorithm with two options; raises unless it can move a module, and a v where there is an optimiser of it."""
    if moves_v and not algorithm.moves_adjoint:
        raise TypeError(
            f"adjoint_optimizer moves v, and {type(algorithm).__name__} with these settings has no v that moves by "
            "steps. Leave it out."
        )
    if not algorithm.in_place:
        raise TypeError(f"{type(algorithm).__name__} has no form that moves a module in place. Use its `step`.")
    if outer_every > 1:
        algorithm = replace(algorithm, outer_every=outer_every)
    return algorithm if projection is None else replace(algorithm, projection=projection)


def _refuse_unknown(owner: str, unknown: Mapping[str, Any]) -> None:
    if "lr" in unknown:
        raise TypeError(
            f"{owner} has no lr=, since three variables move. Pass "
            f"inner_optimizer=functools.partial(torch.optim.SGD, lr={unknown['lr']!r}) for the model; without "
            "optimisers the steps are chosen automatically."
        )
    if unknown:
        raise TypeError(f"{owner} has no argument {', '.join(map(repr, unknown))}.")


def _seed_from_stream() -> int:
    """A seed that follows from torch's random state, which does not move."""
    state = torch.get_rng_state().numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "little") % 2**62


def _form(p: Tensor) -> str:
    return f"{str(p.dtype).removeprefix('torch.')}{list(p.shape)}"

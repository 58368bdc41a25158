"""A transformer with fused attention: products by differences against exact ones, and the experiment with it."""

import json
import warnings
from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

import fsla
from fsla import Batch, FiniteDifferenceWarning, Point, StepBatches, algorithms, make_functional
from fsla._tree import flatten, norm, sub, to
from fsla.algorithms import Simultaneous
from fsla.steps import Adam, constant
from fsla_reproduction import sources as experiment
from fsla_reproduction.folder import Folder
from fsla_reproduction.problems.sources import GRAMMARS, SourceWeighting, Text, TextSpec, weights
from fsla_reproduction.problems.transformer import GPT2_SMALL, TINY, Transformer, TransformerSize, build_transformer

SPEC = TextSpec(symbols=16, length=12, sequences=40, trusted=6, held_out=4)
TEXT = Text.draw(SPEC, 0)
SIZE = TransformerSize(layers=2, width=16, heads=2, vocabulary=16, context=12)
BATCH = torch.arange(0, 40, 5)


def make_problem(size=SIZE, dtype=torch.float64, *, compiled=False, **kind):
    """A problem, a point with uneven weights, and a direction."""
    model = build_transformer(size, seed=0)
    if compiled:
        model.compile(backend="aot_eager")
    omega, net = make_functional(model)
    omega = to(omega, dtype)
    weighting = SourceWeighting(net, TEXT)
    lam = {"source_logits": torch.linspace(-1, 1, len(GRAMMARS), dtype=dtype)}
    g = torch.Generator().manual_seed(1)
    v = {name: torch.randn(t.shape, generator=g, dtype=torch.float64).to(dtype) for name, t in omega.items()}
    return weighting.problem(**kind), Point(lam, omega), v


def products(problem, at, v, seed=None):
    view = problem.inner_at(at, Batch(BATCH, seed))
    hv, jv = view.products(v)
    return {"hvp": hv, "mixed_hvp": jv, "grad_omega": view.grad_omega}


def relative_error(actual, expected):
    """The relative error of each, in float64."""
    return {
        name: float(norm(sub(to(actual[name], torch.float64), to(x, torch.float64))) / norm(to(x, torch.float64)))
        for name, x in expected.items()
    }


@pytest.fixture(scope="module")
def exact():
    """Exact products in float64, for which attention must be its plain formula."""
    with sdpa_kernel(SDPBackend.MATH):
        return products(*make_problem(hvp_method="autograd"))


def test_transformer_sizes():
    def count(size):
        with torch.device("meta"):
            return sum(p.numel() for p in Transformer(size).parameters())

    assert 97e6 < count(GPT2_SMALL) < 99e6
    assert count(GPT2_SMALL) - count(replace(GPT2_SMALL, tied=True)) == 8192 * 768
    assert count(TINY) < 50_000
    with pytest.raises(ValueError, match="multiple of the heads"):
        TransformerSize(width=10, heads=3)


def test_transformer_is_causal():
    model = build_transformer(SIZE, seed=0)
    tokens = TEXT.tokens[:2, :-1]
    changed = tokens.clone()
    changed[:, 8] = (changed[:, 8] + 1) % 16
    change = (model(tokens) - model(changed)).abs().amax((0, 2))
    assert bool((change[:8] == 0).all())
    assert bool((change[8:] > 0).all())


def test_transformer_fused_attention_error_names_it():
    with pytest.raises(NotImplementedError, match="scaled_dot_product"):
        products(*make_problem(hvp_method="autograd"))


def test_transformer_auto_products_warn_once(exact):
    problem, at, v = make_problem(hvp_method="auto")
    with pytest.warns(FiniteDifferenceWarning, match="scaled_dot_product") as caught:
        actual = products(problem, at, v)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        products(problem, at, v)
    assert all(gap < 1e-6 for gap in relative_error(actual, exact).values())


def test_transformer_finite_difference_error_is_second_order(exact):
    problem, at, v = make_problem(hvp_method="finite_difference")
    errors = [relative_error(products(fsla.FiniteDifferenceProblem(problem, r), at, v), exact) for r in (4e-3, 2e-3)]
    for name in ("hvp", "mixed_hvp", "grad_omega"):
        assert errors[0][name] / errors[1][name] == pytest.approx(4, rel=0.05)


def test_transformer_finite_differences_in_float32(exact):
    errors = relative_error(products(*make_problem(dtype=torch.float32, hvp_method="finite_difference")), exact)
    assert errors["hvp"] < 0.01
    assert errors["mixed_hvp"] < 0.01
    assert errors["grad_omega"] < 1e-5


@pytest.mark.parametrize("how", ["checkpointed", "compiled"])
def test_transformer_checkpointed_or_compiled_has_same_products(how):
    plain = products(*make_problem(hvp_method="finite_difference"))
    other = make_problem(replace(SIZE, checkpointed=True)) if how == "checkpointed" else make_problem(compiled=True)
    assert all(gap < 1e-9 for gap in relative_error(products(*other), plain).values())


def test_transformer_checkpointed_block_uses_call_parameters():
    """The module's own parameters are back by then; were they read, the gradient would be that of another network."""
    at = make_problem()[1]
    moved = {name: 1.5 * t + 0.01 for name, t in at.omega.items()}
    sizes = (SIZE, replace(SIZE, checkpointed=True))
    plain, again = (make_functional(build_transformer(size, seed=0).double())[1] for size in sizes)
    gradients = []
    for net in (plain, again):
        view = SourceWeighting(net, TEXT).problem().inner_at(Point(at.lam, moved), Batch(BATCH))
        gradients.append(flatten(view.grad_omega))
    assert torch.equal(*gradients)


def test_transformer_tied_weights_have_full_derivative():
    tied, at, v = make_problem(replace(SIZE, tied=True), hvp_method="finite_difference")
    assert "head.weight" not in at.omega
    with sdpa_kernel(SDPBackend.MATH):
        exact = products(*make_problem(replace(SIZE, tied=True), hvp_method="autograd"))
    assert all(gap < 1e-6 for gap in relative_error(products(tied, at, v), exact).values())
    untied, _, _ = make_problem(hvp_method="finite_difference")
    both = {**at.omega, "head.weight": at.omega["tokens.weight"]}
    apiece = untied.inner_at(Point(at.lam, both), Batch(BATCH)).grad_omega
    whole = tied.inner_at(at, Batch(BATCH)).grad_omega["tokens.weight"]
    torch.testing.assert_close(apiece["tokens.weight"] + apiece["head.weight"], whole)


def test_transformer_dropout_mask_is_shared_by_difference_ends():
    problem, at, v = make_problem(replace(SIZE, dropout=0.3), hvp_method="finite_difference")
    with pytest.raises(ValueError, match="seed"):
        products(problem, at, v)
    first, again = products(problem, at, v, seed=3), products(problem, at, v, seed=3)
    with sdpa_kernel(SDPBackend.MATH):
        exact = products(*make_problem(replace(SIZE, dropout=0.3), hvp_method="autograd"), seed=3)
    assert all(gap < 1e-6 for gap in relative_error(first, exact).values())
    assert max(relative_error(first, again).values()) == 0
    assert relative_error(products(problem, at, v, seed=4), exact)["grad_omega"] > 0.01


@pytest.mark.parametrize("name", ["soba", "fsla"])
def test_transformer_autocast_keeps_state_float32(name):
    problem, at, _ = make_problem(dtype=torch.float32, autocast_dtype=torch.bfloat16)
    rates = constant(0.1, 1e-3, 1e-2)
    algorithm = (
        Simultaneous(step_sizes=rates, inner_update=Adam(), outer_update=Adam())
        if name == "soba"
        else algorithms.fsla(rates, momentum="none")
    )
    batches = StepBatches.draw("shared", lambda: BATCH, lambda: torch.arange(6))
    state = algorithm.init(problem, at, batches)
    for _ in range(3):
        state = algorithm.step(problem, state, batches)
    assert state.is_finite()
    for x in (state.lam.value, state.omega.value, state.v, state.direction):
        assert {t.dtype for t in x.values()} == {torch.float32}
    assert float(norm(state.v)) > 0
    assert problem.inner_at(state.point, Batch(BATCH)).value.dtype == torch.float32


def test_transformer_step_allocates_no_network_sized_zeros(monkeypatch):
    problem, at, _ = make_problem(dtype=torch.float32)
    batches = StepBatches.draw("shared", lambda: BATCH, lambda: torch.arange(6))
    algorithm = algorithms.soba(constant(0.1, 1e-3, 1e-2))
    state = algorithm.init(problem, at, batches)

    def refuse(tree):
        raise AssertionError("a tree of zeros was made")

    monkeypatch.setattr("fsla.algorithms._orders.zeros_like", refuse)
    assert algorithm.step(problem, state, batches).is_finite()


def test_text_follows_grammar_and_seed():
    spec = replace(SPEC, symbols=64, sequences=200, trusted=50, held_out=50, length=40)
    text = Text.draw(spec, 3)
    assert torch.equal(text.tokens, Text.draw(spec, 3).tokens)
    assert not torch.equal(text.tokens, Text.draw(spec, 4).tokens)
    assert text.source.bincount().tolist() == [20] * 10

    def follows(*parts):
        """What follows each token."""
        counts = {}
        for before, after in torch.cat([torch.stack([t[:, :-1], t[:, 1:]]).flatten(1) for t in parts], 1).T.tolist():
            counts.setdefault(before, set()).add(after)
        return counts

    by_source = [text.tokens[text.source == s] for s in range(10)]
    same = {g: follows(*(by_source[s] for s in range(10) if GRAMMARS[s] == g)) for g in "ABC"}
    trusted = follows(text.trusted, text.held_out, *by_source[:3])
    assert all(len(after) <= 4 for grammar in (trusted, *same.values()) for after in grammar.values())
    for other in ("B", "C"):
        assert (
            sum(len(after & trusted.get(t, set())) for t, after in same[other].items()) < 32
        )  # of some 250 pairs, by chance alone
    assert max(map(len, follows(*by_source[8:]).values())) > 8


def test_sources_experiment_writes_and_resumes(tmp_path):
    spec = experiment.SourcesSpec(size=SIZE, text=SPEC, batch=4, steps=12, every=5, wait=2)
    out = tmp_path / "out"
    device = torch.device("cpu")
    seen = []
    records = experiment.run(spec, Folder(out, "sources", spec), device, lambda *args: seen.append(args))
    summary = experiment.conclude(spec, records, Folder(out, "sources", spec))
    learned = [r for r in records if r["run"] == "learnt"]
    assert [r["step"] for r in learned] == [0, 5, 10, 12]
    assert learned[0]["weights"] == [0.5] * 10
    assert learned[-1]["weights"] != learned[0]["weights"]
    assert all(r["weights"] == [0.5] * 10 for r in records if r["run"] == "equal")
    assert all(r["held_out_loss"] > 0 and r["trusted_loss"] > 0 and r["training_loss"] > 0 for r in records)
    assert json.loads((out / "summary.json").read_text()) == json.loads(json.dumps(summary.numbers))
    assert "above 0.8" in summary.text
    assert (out / "summary.md").read_text() == summary.text
    assert next(claim.holds for claim in summary.claims) is False  # twelve steps teach nothing
    assert [args for args in seen if args[0].startswith("equal")] == [
        ("equal, seed 0", done, 2) for done in (1, 1 + 5 / 12, 1 + 10 / 12, 2, 2)
    ]
    seen.clear()
    again = experiment.run(spec, Folder(out, "sources", spec), device, lambda *args: seen.append(args))
    assert again == records
    assert not seen

    from fsla_reproduction.plots.sources import draw

    (figure,) = draw(out, again)
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "<svg" in figure.with_suffix(".svg").read_text()


def test_source_weights_are_between_zero_and_one():
    assert torch.equal(weights({"source_logits": torch.zeros(10)}), torch.full((10,), 0.5))


def test_sources_summary_states_result():
    spec = experiment.SourcesSpec(size=SIZE, text=SPEC, steps=1)
    right = [0.9] * 3 + [0.1] * 7

    def report(weights):
        common = {"seed": 0, "step": 1, "seconds": 1.0, "training_loss": 2.0, "trusted_loss": 2.0}
        learned = {"run": "learnt", "weights": weights, "held_out_loss": 1.5, **common}
        equal = {"run": "equal", "weights": [0.5] * 10, "held_out_loss": 2.5, **common}
        summary = experiment.summarise(spec, [learned, equal])
        return summary["sources"][0], experiment.markdown(spec, summary)

    actual, text = report(right)
    assert actual == {"seed": 0, "up": [0, 1, 2], "down": [3, 4, 5, 6, 7, 8, 9], "right": True}
    assert "1.500 with learnt weights, 2.500" in text
    actual, text = report([0.9, 0.5, *right[2:]])
    assert not actual["right"]
    assert "**not**" in text

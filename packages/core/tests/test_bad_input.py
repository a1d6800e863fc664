"""Bad input gets an error, before anything runs, that names argument, given and expected."""

import pytest
import torch

import chunkwise
from chunkwise import chunk_gated_delta_rule as gdn
from chunkwise import errors


def refuses(kind, *parts, **arguments):
    with pytest.raises(kind) as caught:
        gdn(**arguments)
    for part in parts:
        assert part in str(caught.value), f"{part!r} is not in: {caught.value}"


def test_wrong_rank(inputs):
    inputs["g"] = inputs["g"][..., None]
    refuses(ValueError, "g has shape [2, 5, 4, 1] (4 axes)", "[B T HV] (3 axes)", **inputs)


def test_axis_disagrees_names_who_fixed_it(inputs):
    inputs["k"] = inputs["k"][:, :, :1]
    refuses(ValueError, "k: axis H is 1, but q fixed H = 2", **inputs)


def test_value_heads_not_a_multiple(inputs):
    for name in ("v", "g", "beta"):
        inputs[name] = inputs[name][:, :, :3]
    refuses(ValueError, "HV = 3 is not a multiple of H = 2", **inputs)


def test_mixed_devices(inputs):
    inputs["v"] = inputs["v"].to("meta")
    refuses(ValueError, "v is on meta, but q is on cpu", **inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.complex64, torch.float8_e4m3fn])
def test_wrong_dtype(inputs, dtype):
    inputs["v"] = inputs["v"].to(dtype)
    refuses(TypeError, "v has dtype", "bf16, fp16, fp32", **inputs)


def test_integer_gates(inputs):
    inputs["g"] = inputs["g"].int()
    refuses(TypeError, "g has dtype int32", "bf16, fp16, fp32", **inputs)


def test_no_tensor_and_missing_tensor(inputs):
    refuses(TypeError, "v is a list", "torch.Tensor", **{**inputs, "v": [1.0]})
    refuses(TypeError, "v is None", "required", **{**inputs, "v": None})
    refuses(TypeError, "missing 1 required positional argument: 'beta'", **{k: inputs[k] for k in "qkvg"})


def test_sparse_layout(inputs):
    refuses(TypeError, "q has layout torch.sparse_coo", ".to_dense()", **{**inputs, "q": inputs["q"].to_sparse()})


@pytest.mark.parametrize("keyword", ["cp_contxt", "head_first", "chunk_size"])
def test_unknown_keyword_names_the_op(inputs, keyword):
    refuses(TypeError, "chunk_gated_delta_rule()", keyword, **inputs, **{keyword: True})


def test_keyword_only_after_output_final_state(inputs):
    with pytest.raises(TypeError, match="positional argument"):
        gdn(*inputs.values(), 1.0, None, True, True)


@pytest.mark.parametrize(
    ("option", "value", "expected"),
    [
        ("scale", "big", "a finite float"),
        ("scale", float("nan"), "a finite float"),
        ("scale", True, "a finite float"),
        ("output_final_state", None, "bool"),
        ("state_v_first", "yes", "bool"),
        ("backend", 3, "str"),
        ("scale", [1.0], "a finite float"),
    ],
)
def test_option_of_the_wrong_type(inputs, option, value, expected):
    refuses(TypeError, f"{option} = {value!r}", expected, **inputs, **{option: value})


def test_batch_with_offsets(inputs):
    refuses(ValueError, "B = 2 together with cu_seqlens", "[1, B * T, ...]", **inputs, cu_seqlens=torch.tensor([0, 10]))


@pytest.mark.parametrize(
    ("offsets", "entry", "reason"),
    [
        ([1, 10], "cu_seqlens[0] = 1", "is not 0"),
        ([0, 6, 4, 10], "cu_seqlens[2] = 4", "less than the entry before it, 6"),
        ([0, 5, 11], "cu_seqlens[2] = 11", "passes T = 10"),
        ([-1, 10], "cu_seqlens[0] = -1", "is not 0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_bad_offsets_name_the_entry(packed, offsets, entry, reason, dtype):
    refuses(ValueError, entry, reason, **packed, cu_seqlens=torch.tensor(offsets, dtype=dtype))


def test_bad_offsets_are_seen_behind_a_cached_route(packed):
    gdn(**packed, cu_seqlens=torch.tensor([0, 4, 10]))
    refuses(ValueError, "cu_seqlens[2] = 200", "passes T = 10", **packed, cu_seqlens=torch.tensor([0, 4, 200]))


def test_offsets_of_the_wrong_kind(packed):
    refuses(TypeError, "cu_seqlens has dtype fp32", "int32, int64", **packed, cu_seqlens=torch.tensor([0.0, 10.0]))
    refuses(ValueError, "no entry", **packed, cu_seqlens=torch.tensor([], dtype=torch.int32))
    refuses(ValueError, "cu_seqlens has shape [1, 2]", **packed, cu_seqlens=torch.tensor([[0, 10]]))
    refuses(ValueError, "cu_seqlens_cpu was given without cu_seqlens", **packed, cu_seqlens_cpu=torch.tensor([0, 10]))


def test_host_offsets_of_another_length(packed):
    both = {"cu_seqlens": torch.tensor([0, 10]), "cu_seqlens_cpu": torch.tensor([0, 5, 10])}
    refuses(ValueError, "cu_seqlens_cpu: axis N is 2, but cu_seqlens fixed N = 1", **packed, **both)


def test_initial_state_of_the_wrong_shape(inputs):
    refuses(ValueError, "initial_state: axis V is 8", "v fixed V = 12", **inputs, initial_state=torch.zeros(2, 4, 8, 8))
    refuses(
        ValueError,
        "initial_state: axis N is 3",
        "B (without cu_seqlens) fixed N = 2",
        **inputs,
        initial_state=torch.zeros(3, 4, 8, 12),
    )


def test_initial_state_in_the_other_layout(inputs):
    state = torch.zeros(2, 4, 8, 12)
    given = {**inputs, "initial_state": state, "state_v_first": True}
    refuses(ValueError, "initial_state: axis V is 8, but v fixed V = 12", **given)


def test_model_options_that_mean_nothing_alone(inputs):
    refuses(ValueError, "use_gate_in_kernel=True was given without A_log", **inputs, use_gate_in_kernel=True)
    refuses(ValueError, "A_log was given without use_gate_in_kernel=True", **inputs, A_log=torch.zeros(4))
    refuses(ValueError, "allow_neg_eigval=True was given without", **inputs, allow_neg_eigval=True)
    wrong = torch.zeros(3)
    refuses(ValueError, "A_log: axis HV is 3, but g fixed HV = 4", **inputs, use_gate_in_kernel=True, A_log=wrong)


def test_empty_axes(inputs):
    empty = {name: t[..., :0] if name in "qk" else t for name, t in inputs.items()}
    refuses(ValueError, "axis K is 0", **empty)


def test_vmap(inputs):
    with pytest.raises(chunkwise.ChunkwiseError, match=r"torch\.func transforms"):
        torch.func.vmap(lambda q: gdn(q[None], *(inputs[n][:1] for n in ("k", "v", "g", "beta")))[0])(inputs["q"])


def test_func_grad_and_forward_mode(inputs):
    def loss(v):
        return gdn(**{**inputs, "v": v})[0].sum()

    with pytest.raises(errors.UnsupportedTransformError, match="not supported"):
        torch.func.grad(loss)(inputs["v"])
    with torch.autograd.forward_ad.dual_level(), pytest.raises(errors.UnsupportedTransformError):
        loss(torch.autograd.forward_ad.make_dual(inputs["v"], torch.ones_like(inputs["v"])))


def test_double_backward_raises_when_it_is_asked_for(inputs):
    q = inputs["q"].requires_grad_()
    (dq,) = torch.autograd.grad(gdn(**inputs)[0].sum(), q, create_graph=True)
    with pytest.raises(errors.UnsupportedTransformError, match="gradient of a gradient"):
        dq.pow(2).sum().backward()


def test_create_graph_alone_is_right(inputs):
    q = inputs["q"].requires_grad_()
    (plain,) = torch.autograd.grad(gdn(**inputs)[0].sum(), q)
    (graphed,) = torch.autograd.grad(gdn(**inputs)[0].sum(), q, create_graph=True)
    assert torch.equal(plain, graphed)


class TestValues:
    """What only CHUNKWISE_CHECK=values (here: prefer) looks at."""

    @pytest.fixture(autouse=True)
    def checked(self):
        with chunkwise.prefer(check_values=True):
            yield

    def test_good_values_pass(self, inputs):
        gdn(**inputs)

    def test_positive_gate(self, inputs):
        inputs["g"][1, 2, 3] = 0.25
        refuses(ValueError, "g[1, 2, 3] = 0.25", "g <= 0", **inputs)

    @pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
    def test_nan(self, inputs, name):
        inputs[name].view(-1)[7] = float("nan")
        refuses(ValueError, f"{name}[", "nan", **inputs)

    def test_padding_may_hold_anything(self, packed):
        for name in packed:
            packed[name][:, 8:] = float("nan")
        gdn(**packed, cu_seqlens=torch.tensor([0, 8]))

    def test_host_copy_that_differs(self, packed):
        both = {"cu_seqlens": torch.tensor([0, 5, 10]), "cu_seqlens_cpu": torch.tensor([0, 4, 10])}
        refuses(ValueError, "cu_seqlens[1] = 5", "cu_seqlens_cpu[1] = 4", **packed, **both)


def test_values_are_not_looked_at_by_default(inputs):
    inputs["g"][0, 0, 0] = 0.25
    gdn(**inputs)

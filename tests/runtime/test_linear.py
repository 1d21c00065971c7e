"""Products by oneDNN, and copies of models that compute with it."""

import torch
from torch import nn

from paceline.runtime.linear import product, twin, use_onednn


def test_products_by_onednn_are_those_of_nn_linear() -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(48, 100), nn.Linear(48, 100, bias=False), nn.Linear(48, 100).double()]
    model = nn.ModuleList(layers).requires_grad_(False)
    x = torch.randn(3, 5, 48)
    expected = [layer(x.to(layer.weight.dtype)) for layer in layers]
    use_onednn(model)
    for layer, wanted in zip(layers, expected, strict=True):
        for part in (slice(None), slice(0, 2)):
            torch.testing.assert_close(layer(x[:, part].to(layer.weight.dtype)), wanted[:, part])
    assert [("forward" in vars(layer)) for layer in layers] == [torch.backends.mkldnn.is_available()] * 2 + [False]


def test_a_product_is_that_of_torch_also_where_a_tensor_is_not_in_one_piece() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(2, 5, 48), torch.randn(100, 48)
    torch.testing.assert_close(product(x[:, 1:], weight), x[:, 1:] @ weight.T)
    torch.testing.assert_close(product(x[:, 1:].double(), weight.double()), (x[:, 1:].double() @ weight.double().T))


def test_a_twin_shares_its_tensors_and_leaves_the_other_to_be_trained() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4))
    copied = twin(model)
    use_onednn(copied)
    for one, other in zip(model.state_dict().values(), copied.state_dict().values(), strict=True):
        assert one.data_ptr() == other.data_ptr()
    model(torch.ones(3, 6)).sum().backward()
    assert model[0].weight.grad is not None
    with torch.no_grad():
        model[0].weight.fill_(2)
        assert copied.eval()[0](torch.ones(1, 6))[0, 0] == 12 + model[0].bias[0]
    assert model.training

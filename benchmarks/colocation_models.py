"""Models of the memory benchmark: six to tune the estimator on, and others which it has not seen.

Each trains on random data. Their sizes are such that steps add from a tenth to three times the memory of the bare process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from lightning_dlrover.colocate.peak_memory import Step, step_of

Optimizers = list[torch.optim.Optimizer]


@dataclass
class Work:
    """A training job in this process."""

    module: nn.Module
    optimizers: Optimizers
    batch: Callable[[], Any]
    loss: Step  # None as result: it runs backward and the optimizers itself
    loader: DataLoader[Any] | None = None
    for_estimate: Step | None = None  # default: `loss`

    def batches(self, num_steps: int) -> Iterator[Any]:
        if self.loader is None:
            for _ in range(num_steps):
                yield self.batch()
        else:
            for _, batch in zip(range(num_steps), self.loader, strict=False):
                yield batch


def mlp(widths: list[int], *, layer_norm: bool = False) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after), *([nn.LayerNorm(after)] if layer_norm else []), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Dlrm(nn.Module):
    """Dense features, one embedding for each categorical feature, pairwise products (Naumov et al., arXiv 1906.00091)."""

    def __init__(self, rows: list[int], dim: int, hidden: int, *, sparse: bool = False, bags: bool = True) -> None:
        super().__init__()
        kind: Any = nn.EmbeddingBag if bags else nn.Embedding
        options = {"mode": "sum"} if bags else {}
        self.tables = nn.ModuleList([kind(num, dim, sparse=sparse, **options) for num in rows])
        self.bottom = mlp([13, hidden, dim])
        num_pairs = len(rows) * (len(rows) + 1) // 2
        self.top = mlp([num_pairs + dim, hidden, hidden, 1])
        self.rows, self.bags = rows, bags

    def forward(self, dense: Tensor, sparse: Tensor) -> Tensor:
        bottom = self.bottom(dense)
        columns = [table(sparse[:, i : i + 1] if self.bags else sparse[:, i]) for i, table in enumerate(self.tables)]
        vectors = torch.stack([bottom, *columns], dim=1)
        products = vectors @ vectors.transpose(1, 2)
        first, second = torch.tril_indices(vectors.shape[1], vectors.shape[1], offset=-1)
        out: Tensor = self.top(torch.cat([bottom, products[:, first, second]], dim=1))
        return out

    def data(self, batch_size: int) -> tuple[Tensor, Tensor, Tensor]:
        sparse = torch.stack([torch.randint(0, num, (batch_size,)) for num in self.rows], dim=1)
        return torch.randn(batch_size, 13), sparse, torch.rand(batch_size, 1).round()

    def loss(self, batch: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        dense, sparse, label = batch
        return F.binary_cross_entropy_with_logits(self(dense, sparse), label)


def of_dlrm(model: Dlrm, optimizers: Optimizers, batch_size: int) -> Work:
    return Work(model, optimizers, lambda: model.data(batch_size), model.loss)


def regression(model: nn.Module, optimizer: torch.optim.Optimizer, *shape: int) -> Work:
    return Work(model, [optimizer], lambda: torch.randn(*shape), lambda batch: model(batch).square().mean())


def parameters_without(module: nn.Module, name: str) -> list[nn.Parameter]:
    return [parameter for key, parameter in module.named_parameters() if name not in key]


# Tuned on these.


def mlp_adam() -> Work:
    model = mlp([512, 2048, 2048, 2048, 1])
    return regression(model, torch.optim.Adam(model.parameters()), 2048, 512)


def dlrm_adam() -> Work:
    model = Dlrm([200_000, 50_000, 10_000, 1_000], 32, 256)
    return of_dlrm(model, [torch.optim.Adam(model.parameters())], 2048)


def sparse_adam() -> Work:
    model = Dlrm([300_000, 100_000, 10_000], 64, 256, sparse=True, bags=False)
    sparse = torch.optim.SparseAdam(model.tables.parameters())
    return of_dlrm(model, [sparse, torch.optim.Adam(parameters_without(model, "tables"))], 8192)


def convolutions() -> Work:
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.ReLU()),
        *(nn.Conv2d(64, 64, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10)),
    )
    return regression(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), 64, 3, 64, 64)


def transformer() -> Work:
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    model = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
    return regression(model, torch.optim.AdamW(model.parameters()), 32, 64, 128)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], width: int, hidden: int, num_layers: int) -> None:
        super().__init__()
        self.recurrent = kind(width, hidden, num_layers, batch_first=True)
        self.head = nn.Linear(hidden, 8)

    def forward(self, batch: Tensor) -> Tensor:
        out: Tensor = self.head(self.recurrent(batch)[0])
        return out


def lstm() -> Work:
    model = Recurrent(nn.LSTM, 64, 256, 2)
    return regression(model, torch.optim.Adam(model.parameters()), 128, 64, 64)


TUNED: dict[str, Callable[[], Work]] = {
    each.__name__: each for each in (mlp_adam, dlrm_adam, sparse_adam, convolutions, transformer, lstm)
}


# Not tuned on these.


def dlrm_adagrad() -> Work:
    model = Dlrm([100_000] * 8, 32, 512)
    return of_dlrm(model, [torch.optim.Adagrad(model.parameters())], 2048)


def dlrm_sgd_26_tables() -> Work:
    model = Dlrm([20_000] * 26, 16, 256, bags=False)
    return of_dlrm(model, [torch.optim.SGD(model.parameters(), 0.01)], 4096)


def deepfm_sparse_sgd() -> Work:
    model = Dlrm([400_000, 100_000, 50_000, 5_000], 48, 512, sparse=True)
    return of_dlrm(model, [torch.optim.SGD(model.parameters(), 0.01)], 8192)


class CrossNetwork(nn.Module):
    """Deep and cross network with low-rank crosses (Wang et al., WWW 2021)."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(120_000, 24)
        self.down = nn.ModuleList([nn.Linear(24 * 20, 64, bias=False) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(64, 24 * 20) for _ in range(3)])
        self.deep = mlp([24 * 20, 768, 384, 1], layer_norm=True)

    def forward(self, batch: Tensor) -> Tensor:
        start = x = self.table(batch).flatten(1)
        for down, up in zip(self.down, self.up, strict=True):
            x = start * up(down(x)) + x
        out: Tensor = self.deep(x)
        return out


def cross_network_adamw() -> Work:
    model = CrossNetwork()
    return Work(
        model,
        [torch.optim.AdamW(model.parameters())],
        lambda: torch.randint(0, 120_000, (6000, 20)),
        lambda batch: model(batch).square().mean(),
    )


def one_table_adagrad() -> Work:
    model = nn.Sequential(nn.EmbeddingBag(1_000_000, 24), nn.Linear(24, 1))
    return Work(
        model,
        [torch.optim.Adagrad(model.parameters())],
        lambda: torch.randint(0, 1_000_000, (4096, 10)),
        lambda batch: model(batch).square().mean(),
    )


class InterestNetwork(nn.Module):
    """Attention of a candidate over a user's history of varying length (Zhou et al., KDD 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(150_000, 32, padding_idx=0)
        self.attention = nn.Sequential(nn.Linear(128, 80), nn.Sigmoid(), nn.Linear(80, 1))
        self.top = mlp([64, 200, 80, 1])

    def forward(self, history: Tensor, candidate: Tensor) -> Tensor:
        past, now = self.items(history), self.items(candidate)
        wide = now[:, None].expand_as(past)
        scores = self.attention(torch.cat([past, wide, past - wide, past * wide], dim=-1)).squeeze(-1)
        weights = scores.masked_fill(history == 0, -1e9).softmax(-1)
        out: Tensor = self.top(torch.cat([(weights[..., None] * past).sum(1), now], dim=-1))
        return out


def interest_network_adam() -> Work:
    model = InterestNetwork()

    def batch() -> tuple[Tensor, Tensor]:
        history = torch.randint(1, 150_000, (1024, 50))
        return history * (torch.rand(1024, 50) > 0.4), torch.randint(1, 150_000, (1024,))

    return Work(model, [torch.optim.Adam(model.parameters())], batch, lambda each: model(*each).square().mean())


def autoencoder_large_batch() -> Work:
    model = mlp([256, 512, 128, 512, 256])
    return regression(model, torch.optim.RMSprop(model.parameters()), 32_768, 256)


class Residual(nn.Module):
    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Conv2d(before, after, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()),
            *(nn.Conv2d(after, after, 3, padding=1, bias=False), nn.BatchNorm2d(after)),
        )
        self.short = nn.Conv2d(before, after, 1, stride=2, bias=False)

    def forward(self, batch: Tensor) -> Tensor:
        return F.relu(self.body(batch) + self.short(batch))


def residual_network() -> Work:
    model = nn.Sequential(
        *(nn.Conv2d(3, 32, 5, stride=2, padding=2), Residual(32, 64), Residual(64, 128), Residual(128, 256)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 100)),
    )
    return regression(model, torch.optim.SGD(model.parameters(), 0.01, momentum=0.9), 96, 3, 96, 96)


class LanguageModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20_000, 192)
        layer = nn.TransformerEncoderLayer(192, 6, 768, batch_first=True, activation="gelu", norm_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(192, 20_000)

    def forward(self, words: Tensor) -> Tensor:
        out: Tensor = self.head(self.encoder(self.words(words)))
        return out


def language_model_adamw() -> Work:
    model = LanguageModel()
    return Work(
        model,
        [torch.optim.AdamW(model.parameters())],
        lambda: torch.randint(0, 20_000, (8, 96)),
        lambda words: F.cross_entropy(model(words).flatten(0, 1), words.flatten()),
    )


def gru_adam() -> Work:
    model = Recurrent(nn.GRU, 40, 320, 1)
    return regression(model, torch.optim.Adam(model.parameters()), 192, 80, 40)


def masked_factorization() -> Work:
    """Drop samples by a mask, and read the loss, both of which depend on values."""
    model = nn.Embedding(250_000, 40)

    def loss(batch: Tensor) -> Tensor:
        chosen = batch[batch[:, 0] > 50_000]
        users, items = model(chosen[:, :1]), model(chosen[:, 1:])
        found = F.softplus(-(users * items).sum(-1)).mean()
        return found * 2 if found.item() > 100 else found

    return Work(model, [torch.optim.Adam(model.parameters())], lambda: torch.randint(0, 250_000, (4096, 21)), loss)


class Adversarial(L.LightningModule):
    """Two optimizers that the module steps itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = mlp([64, 1024, 2048, 3072])
        self.judge = mlp([3072, 1024, 512, 1])

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        pair: Any = self.optimizers()
        first, second = pair
        fake = self.generator(torch.randn(len(batch), 64))
        first.zero_grad()
        loss = F.softplus(-self.judge(fake)).mean()
        self.manual_backward(loss)
        first.step()
        second.zero_grad()
        loss = F.softplus(self.judge(fake.detach())).mean() + F.softplus(-self.judge(batch)).mean()
        self.manual_backward(loss)
        second.step()
        self.log("loss", loss)


def adversarial_two_optimizers() -> Work:
    module = Adversarial()
    optimizers: Optimizers = [
        torch.optim.Adam(module.generator.parameters()),
        torch.optim.AdamW(module.judge.parameters()),
    ]
    step = step_of(module, optimizers)
    return Work(module, optimizers, lambda: torch.randn(1024, 3072), step)


class Images(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1 << 20

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((3 * 64 * 64,), index % 255 / 255)


def loader_workers() -> Work:
    model = mlp([3 * 64 * 64, 512, 256, 10])
    work = regression(model, torch.optim.Adam(model.parameters()), 512, 3 * 64 * 64)
    work.loader = DataLoader(Images(), batch_size=512, num_workers=2)
    return work


def jagged(rows: list[int], batch_size: int, per_sample: int) -> Any:
    from torchrec import KeyedJaggedTensor

    lengths = torch.full((len(rows) * batch_size,), per_sample)
    values = torch.cat([torch.randint(0, num, (batch_size * per_sample,)) for num in rows])
    return KeyedJaggedTensor([f"f{i}" for i in range(len(rows))], values, lengths=lengths)


def collection(rows: list[int], dim: int, device: str = "cpu") -> Any:
    from torchrec import EmbeddingBagCollection, EmbeddingBagConfig

    tables = [
        EmbeddingBagConfig(num_embeddings=num, embedding_dim=dim, name=f"t{i}", feature_names=[f"f{i}"])
        for i, num in enumerate(rows)
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device(device))


class OfTables(nn.Module):
    def __init__(self, tables: nn.Module, width: int) -> None:
        super().__init__()
        self.tables, self.top = tables, mlp([width, 512, 256, 1])

    def forward(self, batch: Any) -> Tensor:
        out: Tensor = self.top(self.tables(batch).values())
        return out


def torchrec_tables_adam() -> Work:
    rows = [150_000, 60_000, 20_000, 500]
    model = OfTables(collection(rows, 32), 32 * len(rows))
    return Work(
        model,
        [torch.optim.Adam(model.parameters())],
        lambda: jagged(rows, 2048, 3),
        lambda batch: model(batch).square().mean(),
    )


def torchrec_fused_rowwise() -> Work:
    """Sharded tables with an optimizer in their backward pass."""
    import torch.distributed as dist
    from torch._C._distributed_c10d import HashStore
    from torch.distributed.optim import _apply_optimizer_in_backward
    from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
    from torchrec.distributed.model_parallel import DistributedModelParallel
    from torchrec.optim import RowWiseAdagrad

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    rows = [500_000, 250_000, 100_000, 2_000]
    model = OfTables(collection(rows, 48, "meta"), 48 * len(rows))
    _apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": 0.01})
    sharder: Any = EmbeddingBagCollectionSharder()
    parallel = DistributedModelParallel(model, device=torch.device("cpu"), sharders=[sharder])
    dense = torch.optim.Adam([each for name, each in parallel.named_parameters() if "top" in name])
    return Work(parallel, [dense], lambda: jagged(rows, 4096, 4), lambda batch: parallel(batch).square().mean())


HELD_OUT: dict[str, Callable[[], Work]] = {
    each.__name__: each
    for each in (
        *(dlrm_adagrad, dlrm_sgd_26_tables, deepfm_sparse_sgd, cross_network_adamw, one_table_adagrad),
        *(interest_network_adam, autoencoder_large_batch, residual_network, language_model_adamw, gru_adam),
        *(masked_factorization, adversarial_two_optimizers, loader_workers, torchrec_tables_adam, torchrec_fused_rowwise),
    )
}

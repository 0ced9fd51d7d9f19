"""Train on graphs in batches of bounded nodes and edges: python examples/graph_budget.py."""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from linnaeus import BudgetBatchSampler, find_budget


class GraphNet(nn.Module):
    """A round of messages along the edges, and a head on the mean of the nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.head = nn.Linear(8, 64), nn.Linear(64, 2)

    def forward(self, nodes: Tensor, edges: Tensor, graph_of: Tensor) -> Tensor:
        """Nodes (N, 8), edges (2, E) and the graph of each node -> logits (graphs, 2)."""
        sent = self.message(nodes)
        nodes = (sent + torch.zeros_like(sent).index_add(0, edges[1], sent[edges[0]])).relu()
        sizes = graph_of.bincount()[:, None]
        return self.head(nodes.new_zeros(len(sizes), 64).index_add(0, graph_of, nodes) / sizes)


def collate(graphs: list[tuple[Tensor, Tensor, int]]) -> tuple[Tensor, ...]:
    """Join graphs into one, whose edges have shifted node numbers; nothing is padded."""
    nodes, edges, labels = zip(*graphs, strict=True)
    counts = torch.tensor([*map(len, nodes)])
    shift = (counts.cumsum(0) - counts).repeat_interleave(torch.tensor([e.shape[1] for e in edges]))
    graph_of = torch.arange(len(graphs)).repeat_interleave(counts)
    return torch.cat(nodes), torch.cat(edges, 1) + shift, graph_of, torch.tensor(labels)


def run(num_steps: int, limit_gb: float = 1.0) -> list[float]:
    """Find the budget, train for at most an epoch, and return the losses."""
    torch.manual_seed(0)
    sizes = (10 + 490 * torch.rand(4000) ** 3).int().tolist()
    graphs = [(torch.randn(n, 8) + n % 2, torch.randint(n, (2, 4 * n)), n % 2) for n in sizes]
    model = GraphNet()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(batch: tuple[Tensor, ...]) -> float:
        loss = nn.functional.cross_entropy(model(*batch[:3]), batch[3])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    cost = [len(nodes) + edges.shape[1] for nodes, edges, _ in graphs]
    options = {"cost": cost, "unit": "nodes and edges", "memory_limit_gb": limit_gb}
    found = find_budget(step, graphs, collate, state=(model, optimizer), **options)
    sampler = BudgetBatchSampler(found.costs, found.budget)
    loader = DataLoader(graphs, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    losses = [step(batch) for batch, _ in zip(loader, range(num_steps), strict=False)]
    print(f"{found.budget} nodes and edges: losses {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    run(10)

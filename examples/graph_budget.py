"""Train on graphs of unequal size, in batches of a bounded number of nodes and edges.

    python examples/graph_budget.py

A batch is one large graph: the nodes of its graphs, and their edges with shifted node numbers. Nothing is
padded, so the costs of the graphs are added.
"""

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from linnaeus import BudgetBatchSampler, find_budget

Graph = tuple[Tensor, Tensor, int]
"""Node features (nodes, 8), edges (2, edges) and a class."""


class GraphNet(nn.Module):
    """Two rounds of messages along the edges, and a head on the mean of the nodes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.messages = nn.ModuleList([nn.Linear(8, width), nn.Linear(width, width)])
        self.head = nn.Linear(width, 2)

    def forward(self, nodes: Tensor, edges: Tensor, graph_of: Tensor, num_graphs: int) -> Tensor:
        for layer in self.messages:
            sent = layer(nodes)
            nodes = (sent + torch.zeros_like(sent).index_add(0, edges[1], sent[edges[0]])).relu()
        sums = nodes.new_zeros(num_graphs, nodes.shape[1]).index_add(0, graph_of, nodes)
        return self.head(sums / graph_of.bincount(minlength=num_graphs)[:, None])


def collate(graphs: list[Graph]) -> tuple[Tensor, ...]:
    """Join graphs into one: nodes, edges, the graph of each node, and the classes."""
    counts = torch.tensor([len(nodes) for nodes, _, _ in graphs])
    shifts = (counts.cumsum(0) - counts).tolist()
    edges = [edges + shift for (_, edges, _), shift in zip(graphs, shifts, strict=True)]
    graph_of = torch.arange(len(graphs)).repeat_interleave(counts)
    labels = torch.tensor([label for _, _, label in graphs])
    return torch.cat([nodes for nodes, _, _ in graphs]), torch.cat(edges, 1), graph_of, labels


def run(num_steps: int, limit_gb: float = 1.0) -> list[float]:
    """Find the budget, train, and return the losses."""
    torch.manual_seed(0)
    graphs = [random_graph(number) for number in range(400)]
    model = GraphNet()
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), list[float]()

    def step(batch: tuple[Tensor, ...]) -> float:
        *graph, labels = batch
        loss = nn.functional.cross_entropy(model(*graph, len(labels)), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def cost(graph: Graph) -> int:
        return len(graph[0]) + graph[1].shape[1]

    options = {"cost": cost, "unit": "nodes and edges", "memory_limit_gb": limit_gb}
    found = find_budget(step, graphs, collate, state=(model, optimizer), **options)
    sampler = BudgetBatchSampler(found.costs, found.budget)
    loader = DataLoader(graphs, batch_sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]
    while len(losses) < num_steps:
        sampler.set_epoch(len(losses))
        losses += map(step, loader)
    print(f"{found.budget} nodes and edges: losses {losses[0]:.3f} to {losses[-1]:.3f}")
    return losses


def random_graph(number: int) -> Graph:
    """A graph of 10 to 500 nodes, whose features depend on its class."""
    num_nodes = 10 + int(490 * float(torch.rand(())) ** 3)
    edges = torch.randint(num_nodes, (2, 4 * num_nodes))
    return torch.randn(num_nodes, 8) + number % 2, edges, number % 2


if __name__ == "__main__":
    run(10)

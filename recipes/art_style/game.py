"""A small sliding game: equal tiles that meet become one of twice their value. 3 × 3 cells, won at 32."""

import random
from dataclasses import dataclass, field

SIZE, GOAL = 3, 32
MOVES = ("left", "right", "up", "down")


@dataclass
class Game:
    """One game; the same seed and the same moves give the same game."""

    seed: int
    cells: list[list[int]] = field(default_factory=lambda: [[0] * SIZE for _ in range(SIZE)])

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self._add()
        self._add()

    @property
    def best(self) -> int:
        return max(max(row) for row in self.cells)

    @property
    def won(self) -> bool:
        return self.best >= GOAL

    @property
    def over(self) -> bool:
        return self.won or not any(self._after(move) != self.cells for move in MOVES)

    def move(self, move: str) -> bool:
        """Make a move; False if it is no move or changes nothing."""
        if move not in MOVES or (after := self._after(move)) == self.cells:
            return False
        self.cells = after
        self._add()
        return True

    def text(self) -> str:
        return "\n".join(" ".join(f"{cell or '.':>2}" for cell in row) for row in self.cells)

    def _add(self) -> None:
        free = [(row, column) for row in range(SIZE) for column in range(SIZE) if not self.cells[row][column]]
        if free:
            row, column = self.random.choice(free)
            self.cells[row][column] = 2 if self.random.random() < 0.9 else 4

    def _after(self, move: str) -> list[list[int]]:
        lines = self.cells if move in ("left", "right") else [list(column) for column in zip(*self.cells, strict=True)]
        backward = move in ("right", "down")
        moved = [_slide(line[::-1])[::-1] if backward else _slide(line) for line in lines]
        return moved if move in ("left", "right") else [list(row) for row in zip(*moved, strict=True)]


def _slide(line: list[int]) -> list[int]:
    """A line after its tiles slid to the beginning; each tile joins once."""
    tiles = [cell for cell in line if cell]
    found: list[int] = []
    while tiles:
        tile = tiles.pop(0)
        if tiles and tiles[0] == tile:
            tile += tiles.pop(0)
        found.append(tile)
    return found + [0] * (len(line) - len(found))

"""Sokoban: push every box onto a target. A wrong push cannot be undone, so the policy has to look before it moves.

Rewards follow RAGEN: -0.1 a step, +1 for a box pushed onto a target, -1 for one pushed off, +10 when all boxes are on targets.

Rooms are made backwards. From the solved positions of a random floor plan a breadth-first search walks and *pulls*; the
level at which it first meets a position is that position's exact shortest solution. So every room is solvable by
construction, its difficulty is known, and `best_actions` needs no search of its own while the game stays on that map.

Left out on purpose: the gym-sokoban generator (random play that may fail and retry, and no bound on the solution).
"""

import heapq
from collections.abc import Iterator

from nanoragen.envs.base import Game, check_whole

WALL, FLOOR, TARGET, BOX_ON_TARGET, BOX, PLAYER, PLAYER_ON_TARGET = "#_O√XPS"
MAX_STATES = 20_000  # positions the backward search visits at most: all of a one-box room, the nearest of a larger one
MAX_TRIES = 300  # floor plans drawn for one room


class Sokoban(Game):
    """
    height, width   room size with its outer walls, 5 to 10
    boxes           1 to 3
    observation     "grid", "coordinates" or "both". Coordinates are rows down,columns right of the player (+1,-2: one down,
                    two left), and the moves that are free: what an agent needs, without counting cells
    min_moves, max_moves   bounds of the shortest solution, in moves

    State: the cell numbers (row * width + column) of the player and the boxes.
    """

    actions = ("Up", "Down", "Left", "Right")
    max_turns = 5
    max_actions_per_turn = 2
    step_reward = -0.1
    instruction = (
        "You play Sokoban: push every box X onto a target O. # wall, _ floor, P you, S you on a target, √ box on a target. "
        "You push a box by walking into it; you cannot pull. Actions: Up, Down, Left, Right, at most 2 a turn. "
        "Reply <think>your reasoning</think><answer>Up || Left</answer>"
    )

    def __init__(self, height=6, width=6, boxes=1, observation="both", min_moves=2, max_moves=10):
        super().__init__()
        check_whole("sokoban", 5, 10, height=height, width=width)
        check_whole("sokoban", 1, 3, boxes=boxes)
        if observation not in ("grid", "coordinates", "both"):
            raise ValueError(f"observation: {observation!r}; valid: grid, coordinates, both")
        if not 1 <= min_moves <= max_moves:
            raise ValueError(f"min_moves, max_moves: {min_moves}, {max_moves}; valid: 1 <= min_moves <= max_moves")
        self.height, self.width, self.boxes_wanted = height, width, boxes
        self.observation, self.min_moves, self.max_moves = observation, min_moves, max_moves
        self._delta = {"Up": -width, "Down": width, "Left": -1, "Right": 1}

    def _start(self, seed):
        if not any(self._draw_room() for _ in range(MAX_TRIES)):  # one plan is mostly enough
            raise ValueError(
                f"min_moves, max_moves: no {self.height}x{self.width} room with {self.boxes_wanted} boxes and a shortest "
                f"solution of {self.min_moves} to {self.max_moves} moves in {MAX_TRIES} tries; valid: a wider range"
            )

    def step(self, action):
        name = str(action).strip().capitalize()
        valid = name in self._delta
        solved_before = self._solved()
        player, boxes = self._next(self.player, self.boxes, self._delta[name]) if valid else (self.player, self.boxes)
        effective = (player, boxes) != (self.player, self.boxes)
        gained = len(boxes & self.targets) - len(self.boxes & self.targets)
        self.player, self.boxes = player, boxes
        solved = self._solved()
        reward = self.step_reward + gained + (10.0 if solved and not solved_before else 0.0)
        return self._result(reward, solved, solved, valid, effective)

    def render(self):
        lines = []
        if self.observation != "coordinates":
            cells = [WALL if c in self.walls else self._symbol(c) for c in range(self.height * self.width)]
            lines += ["".join(cells[r * self.width : (r + 1) * self.width]) for r in range(self.height)]
        if self.observation != "grid":
            free = [a.lower() for a, d in self._delta.items() if self._next(self.player, self.boxes, d)[0] != self.player]
            lines.append(
                f"box {self._from_player(self.boxes)} target {self._from_player(self.targets)} free {' '.join(free) or 'none'}"
            )
        if self.observation == "coordinates":  # without the grid the inner walls must be said too
            inner = [c for c in self.walls if self._inside(c)]
            lines.append(
                f"player {self._where([self.player])} of {self.height},{self.width} walls {self._from_player(inner) or 'none'}"
            )
        return "\n".join(lines)

    # -- solver --------------------------------------------------------------------------------------------------------

    def demonstrate(self) -> Iterator[str]:
        """Shortest solution, one move a time. Ends at once where the position cannot be solved any more."""
        while not self._solved():
            best = self.best_actions() or self._search()[:1]
            if not best:
                return
            yield best[0]

    def best_actions(self) -> list[str]:
        """All first moves of shortest solutions, from the backward map; [] when the position is not on it."""
        here = self._moves_left.get((self.player, self.boxes))
        if not here:
            return []
        after = {a: self._moves_left.get(self._next(self.player, self.boxes, d)) for a, d in self._delta.items()}
        return [a for a, left in after.items() if left == here - 1]

    def _search(self) -> list[str]:
        """A* on moves, for positions outside the map. Each box needs at least its distance to the nearest target."""

        def bound(boxes):
            return sum(min(abs(b // self.width - t // self.width) + abs(b % self.width - t % self.width)
                           for t in self.targets) for b in boxes)  # fmt: skip

        start = (self.player, self.boxes)
        came, cost, heap, tick = {start: None}, {start: 0}, [(bound(self.boxes), 0, start)], 0
        while heap:
            _, _, state = heapq.heappop(heap)
            if state[1] == self.targets:
                moves = []
                while came[state]:
                    state, name = came[state]
                    moves.append(name)
                return moves[::-1]
            for name, d in self._delta.items():
                after = self._next(*state, d)
                if after != state and cost[state] + 1 < cost.get(after, 1 << 30):
                    cost[after], came[after], tick = cost[state] + 1, (state, name), tick + 1
                    heapq.heappush(heap, (cost[after] + bound(after[1]), tick, after))
        return []

    # -- the room ------------------------------------------------------------------------------------------------------

    def _draw_room(self) -> bool:
        """One try at a room: floor plan, targets, backward map, start. False when the plan has no fitting start."""
        rng, height, width = self.np_random, self.height, self.width
        inside = [c for c in range(height * width) if self._inside(c)]
        blocked = rng.random(len(inside)) < 0.18
        floor = self._largest_region({c for c, b in zip(inside, blocked) if not b})
        if len(floor) < 2 * self.boxes_wanted + 3:
            return False
        self.walls = frozenset(range(height * width)) - floor
        self.targets = frozenset(int(c) for c in rng.choice(sorted(floor), self.boxes_wanted, replace=False))
        self._moves_left = self._backward_map(floor)
        by_moves = {}
        for (player, boxes), moves in self._moves_left.items():
            if self.min_moves <= moves <= self.max_moves and not boxes & self.targets:
                by_moves.setdefault(moves, []).append((player, tuple(sorted(boxes))))
        if not by_moves:
            return False
        # Uniform over lengths first: far positions outnumber near ones, and would crowd them out.
        starts = sorted(by_moves[sorted(by_moves)[rng.integers(len(by_moves))]])
        player, boxes = starts[rng.integers(len(starts))]
        self.player, self.boxes = player, frozenset(boxes)
        return True

    def _backward_map(self, floor) -> dict:
        """(player, boxes) -> moves of the shortest solution, breadth first from the solved positions."""
        level = [(p, self.targets) for p in sorted(floor - self.targets)]
        moves_left = dict.fromkeys(level, 0)
        moves = 0
        while level and len(moves_left) < MAX_STATES:
            moves += 1
            previous = []
            for player, boxes in level:
                for d in self._delta.values():
                    came_from = player - d
                    if came_from not in floor or came_from in boxes:
                        continue
                    before = [(came_from, boxes)]  # a walk, or a push that moved the box from `player` one further
                    if player + d in boxes:
                        before.append((came_from, boxes - {player + d} | {player}))
                    for state in before:
                        if state not in moves_left:
                            moves_left[state] = moves
                            previous.append(state)
            level = previous
        return moves_left

    def _largest_region(self, cells) -> frozenset:
        """The largest connected part of a set of cells."""
        best, left = set(), set(cells)
        while left:
            region, edge = set(), [min(left)]
            while edge:
                cell = edge.pop()
                if cell in left:
                    left.discard(cell)
                    region.add(cell)
                    edge += [cell + d for d in self._delta.values()]
            if len(region) > len(best):
                best = region
        return frozenset(best)

    def _next(self, player, boxes, d):
        """The position after a move by d cells; unchanged where a wall or a second box is in the way."""
        to = player + d
        if to in self.walls:
            return player, boxes
        if to in boxes:
            if to + d in self.walls or to + d in boxes:
                return player, boxes
            boxes = boxes - {to} | {to + d}
        return to, boxes

    def _solved(self) -> bool:
        return self.boxes == self.targets

    def _inside(self, cell) -> bool:
        return 0 < cell // self.width < self.height - 1 and 0 < cell % self.width < self.width - 1

    def _symbol(self, cell) -> str:
        on_target = cell in self.targets
        if cell == self.player:
            return PLAYER_ON_TARGET if on_target else PLAYER
        if cell in self.boxes:
            return BOX_ON_TARGET if on_target else BOX
        return TARGET if on_target else FLOOR

    def _from_player(self, cells) -> str:
        row, column = divmod(self.player, self.width)
        return " ".join(f"{c // self.width - row:+d},{c % self.width - column:+d}" for c in sorted(cells))

    def _where(self, cells) -> str:
        return " ".join(f"{c // self.width},{c % self.width}" for c in sorted(cells))

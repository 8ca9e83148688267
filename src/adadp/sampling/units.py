"""Units of privacy that are more than one row of the dataset, and how the units of a lot become rows of batches.

A lot is a lot of units: persons, or examples. `Grouping` turns each that was drawn into rows of a batch, one after the
other, and tells the step which rows are one contribution (`gradients.forms.segments`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from adadp.errors import ConfigurationError
from adadp.gradients.forms.segments import Segments
from adadp.persons import MOST_ROWS, PERSON, rows_by_person
from adadp.sampling.schemes import Sampling, scheme

if TYPE_CHECKING:
    from adadp.randomness import Randomness


class Units:
    """Which rows of a dataset belong to the same person (household, device, ...), and how much of each is used.

    `make_private(unit=ids)` stands for `make_private(unit=Units(ids))`.

    Args:
        ids: one for each row of the dataset: texts, numbers, anything that prints. All rows without an id (None, NaN or
            an empty text) are one person together: whoever they belong to is then protected too.
        max_rows: how many rows of a person are in a lot at most, public. Who has more is in each lot with rows drawn
            anew, by a draw that looks at nothing but their number.
        reduction: what is clipped is the "mean" of the person's gradients over the rows in the lot, or their "sum".
        declared: the number N of persons that q = L / N is made with, public. Without it the number of different ids
            counts as public.
        name: of the ids' column, for the guarantee.

    Raises:
        ConfigurationError: an argument is not as described.

    Guarantee:
        Neighbouring datasets differ by all rows of one id, however many. Ids are compared as texts, 3.0 as 3: writing
        two persons' ids alike makes them one, which protects both; writing one person's ids in two ways makes them two.

    """

    def __init__(
        self,
        ids: Iterable[Any],
        *,
        max_rows: int = MOST_ROWS,
        reduction: Literal["mean", "sum"] = "mean",
        declared: int | None = None,
        name: str | None = None,
    ) -> None:
        if isinstance(max_rows, bool) or not isinstance(max_rows, int) or max_rows < 1:
            raise ConfigurationError(f"max_rows must be a whole number of at least 1, not {max_rows!r}")
        if reduction not in ("mean", "sum"):
            raise ConfigurationError(f"reduction must be 'mean' or 'sum', not {reduction!r}")
        if declared is not None and (isinstance(declared, bool) or not isinstance(declared, int) or declared < 1):
            raise ConfigurationError(f"declared must be a number of persons, at least 1, not {declared!r}")
        given = name if name is not None else getattr(ids, "name", None)
        self.name = given if isinstance(given, str) and given.strip() else None
        self.max_rows, self.reduction = max_rows, reduction
        self._rows = rows_by_person(ids)
        self.examples = sum(map(len, self._rows))
        self.declared = len(self._rows) if declared is None else declared

    @property
    def there(self) -> int:
        """How many persons there are."""
        return len(self._rows)

    def sampling(self, name: str, lot: int) -> Sampling:
        """The scheme called `name` that draws persons, `lot` of them on average.

        Raises:
            ConfigurationError: the lot is larger than the number of persons, or the scheme needs their true number.

        """
        if lot > self.declared:
            raise ConfigurationError(
                f"with unit= a lot counts persons: the DataLoader's batch_size ({lot:,}) is the expected number of "
                f"persons in a lot, and there are {self.declared:,}"
            )
        drawn = scheme(name)(self.declared, lot)
        if self.there != self.declared and name != "poisson":
            raise ConfigurationError(
                f"{name} sampling draws from persons that are there: their number cannot be declared as another. Use "
                "sampling='poisson', or leave declared out"
            )
        drawn.there = self.there
        return drawn

    def rows_of(self, person: int) -> list[int]:
        """The rows of a person in the dataset."""
        return self._rows[person]

    def assumptions(self) -> list[str]:
        """What a guarantee for persons rests on."""
        column = "in the ids" if self.name is None else f"of {self.name}"
        return [
            f"a person is all rows with one value {column}, however many; each person has one id; rows without an id "
            "are one person together",
            f"at most {self.max_rows} rows of a person are in a lot, a number that was chosen without the data",
        ]


class Grouping:
    """How the units of a lot become rows: a person's rows or one example's, each `views` times over.

    Args:
        units: which rows are whose; None where each row is a unit.
        views: how often each row is in a batch (`augmentations`): its gradient is the mean over its views.

    """

    def __init__(self, units: Units | None, views: int = 1) -> None:
        self.units, self.views = units, views
        self.most = (1 if units is None else units.max_rows) * views

    def rows_of(self, drawn: Sequence[int], lot: int, randomness: Randomness) -> list[list[int]]:
        """The rows of each unit that was drawn for a lot. They follow from the run's key, lot and attempt."""
        if self.units is None:
            return [[row] * self.views for row in drawn]
        stream = None
        found = []
        for person in drawn:
            rows = self.units.rows_of(person)
            if len(rows) > self.units.max_rows:
                stream = stream or randomness.lot_stream(lot, "rows of ")
                chosen = stream.permutation(len(rows))[: self.units.max_rows].tolist()
                rows = [rows[place] for place in sorted(chosen)]
            found.append([row for row in rows for _ in range(self.views)])
        return found

    def sampling(self, name: str, examples: int, lot: int) -> Sampling:
        """The scheme called `name` that draws units, `lot` of them on average."""
        drawn = scheme(name)(examples, lot) if self.units is None else self.units.sampling(name, lot)
        drawn.rows = lot * self.most
        drawn.noted = {"augmentations": self.views} if self.views > 1 else {}
        if self.units is not None:
            drawn.noted |= {"unit": PERSON, "most_rows": self.units.max_rows, "reduction": self.units.reduction}
        return drawn

    def look(self) -> object:
        """Whose each row is and how rows are used: what several processes must have been given alike."""
        units = self.units
        whose = None if units is None else (units._rows, units.max_rows, units.reduction, units.declared)
        return self.views, whose

    def at_a_time(self, size: int) -> int:
        """How many units a batch of at most `size` rows has room for, whatever rows they have."""
        if size < self.most:
            raise ConfigurationError(
                f"max_physical_batch_size={size} has no room for the {self.most} rows that one unit may have in a lot: "
                "a unit is never split between batches. Give it at least that many, or lower max_rows or augmentations"
            )
        return size // self.most

    def segments(self, groups: Sequence[Sequence[int]], planned: int) -> Segments:
        """Which rows of a batch that holds these units belong together. An empty batch has one unit without rows."""
        sizes = [len(rows) for rows in groups] or [0]
        mean = self.units is None or self.units.reduction == "mean"
        shares = [1 / max(1, size) if mean else 1 / self.views for size in sizes]
        return Segments(sizes, self.most, planned, shares)


def grouping_of(unit: Any, augmentations: int, loader: Any) -> Grouping | None:
    """What `make_private(unit=, augmentations=)` asks for; None where each row of the dataset is one contribution."""
    if isinstance(augmentations, bool) or not isinstance(augmentations, int) or augmentations < 1:
        raise ConfigurationError(f"augmentations must be a whole number of at least 1, not {augmentations!r}")
    if unit is None:
        return Grouping(None, augmentations) if augmentations > 1 else None
    units = unit if isinstance(unit, Units) else Units(unit)
    rows = len(loader.dataset) if hasattr(getattr(loader, "dataset", None), "__len__") else None
    if rows is not None and units.examples != rows:  # a loader without a length is refused for that
        raise ConfigurationError(f"unit= has {units.examples:,} ids, but the dataset has {rows:,} rows")
    return Grouping(units, augmentations)

"""Which rows become requests: as many of every class, enough long prompts, short enough on average,
seeded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from tasks.contracts import InputError
from tasks.params import PrepareRequests
from tasks.sources.tokens import TokenRow


def merge_small_classes(
    rows: Sequence[TokenRow], count: int, min_class_size: int
) -> tuple[dict[str, list[TokenRow]], dict[str, str]]:
    """Group rows by class; the smallest class joins the next smallest until every class can have enough
    requests.

    Returns class -> rows, and merged class -> the class that it went into. Raises InputError below two
    classes.
    """
    groups: dict[str, list[TokenRow]] = {}
    for row in rows:
        groups.setdefault(row.class_name, []).append(row)
    sizes = {name: len(group) for name, group in sorted(groups.items())}
    merged: dict[str, str] = {}

    def too_small() -> bool:
        return min(map(len, groups.values())) < min_class_size or count // len(groups) < min_class_size

    while len(groups) > 1 and too_small():
        smallest, into = sorted(groups, key=lambda name: (len(groups[name]), name))[:2]
        groups[into] += [replace(row, class_name=into) for row in groups.pop(smallest)]
        merged = {name: into if target == smallest else target for name, target in merged.items()}
        merged[smallest] = into
    if len(groups) < 2:
        raise InputError(
            f"fewer than two classes have {min_class_size} requests each: {count} requests wanted, "
            f"usable rows {sizes or 'none'}; give more rows, raise count, or lower min_class_size"
        )
    return dict(sorted(groups.items())), dict(sorted(merged.items()))


def quotas(sizes: dict[str, int], count: int) -> dict[str, int]:
    """Spread `count` evenly over classes; what a small class cannot give, the others share."""
    if sum(sizes.values()) < count:
        raise InputError(
            f"{count} requests wanted, but only {sum(sizes.values())} rows are usable ({sizes}); lower "
            "prepare_requests.count, or raise prompt_tokens"
        )
    given = dict.fromkeys(sizes, 0)
    while (missing := count - sum(given.values())) > 0:
        for name in [name for name in sizes if given[name] < sizes[name]][:missing]:
            given[name] += 1
    return given


def choose(groups: dict[str, list[TokenRow]], params: PrepareRequests) -> list[TokenRow]:
    """`params.count` rows, seeded; the share of long prompts and the mean of tokens are met or refused.

    Raises InputError that says what could be met.
    """
    random = np.random.default_rng(params.seed)
    groups = dict(sorted(groups.items()))
    quota = quotas({name: len(group) for name, group in groups.items()}, params.count)
    strata: dict[tuple[str, bool], list[TokenRow]] = {}
    for name, group in groups.items():
        for row in (sorted(group, key=lambda row: row.id)[index] for index in random.permutation(len(group))):
            strata.setdefault((name, len(row.prompt_ids) >= params.long_prompt_tokens), []).append(row)
    take_long = _long_counts(strata, quota, params)
    taken: dict[tuple[str, bool], int] = {}
    for name, number in quota.items():
        taken[name, True] = take_long[name]
        taken[name, False] = number - take_long[name]
    chosen = {key: strata.get(key, [])[:number] for key, number in taken.items()}
    _shorten(chosen, strata, params)
    return sorted((row for rows in chosen.values() for row in rows), key=lambda row: row.id)


def _long_counts(
    strata: dict[tuple[str, bool], list[TokenRow]], quota: dict[str, int], params: PrepareRequests
) -> dict[str, int]:
    """Long prompts per class: as few as its short rows force, then one more in turn until the share is
    met.
    """
    most = {name: min(number, len(strata.get((name, True), []))) for name, number in quota.items()}
    long = {name: max(0, number - len(strata.get((name, False), []))) for name, number in quota.items()}
    wanted = math.ceil(params.long_share * params.count)
    while (reached := sum(long.values())) < wanted:
        room = [name for name in quota if long[name] < most[name]]
        if not room and params.source in ("jsonl", "hub"):
            known = f"  only {reached} of {params.count} prompts have {params.long_prompt_tokens} tokens"
            print(f"{known}: the rows given have no more; {wanted} were wanted")
            break
        if not room:
            raise InputError(
                f"{wanted} of {params.count} prompts should have {params.long_prompt_tokens} tokens or more, "
                f"but only {reached} can: lower long_share to "
                f"{math.floor(100 * reached / params.count) / 100}, lower long_prompt_tokens, or raise "
                "prompt_tokens"
            )
        for name in room[: wanted - reached]:
            long[name] += 1
    return long


def _shorten(
    chosen: dict[tuple[str, bool], list[TokenRow]],
    strata: dict[tuple[str, bool], list[TokenRow]],
    params: PrepareRequests,
) -> None:
    """Exchange the longest chosen row for the shortest spare one of its stratum until the mean is low
    enough.
    """
    total = sum(row.tokens for rows in chosen.values() for row in rows)
    while total > params.mean_tokens * params.count:
        best: tuple[int, tuple[str, bool], TokenRow, TokenRow] | None = None
        for key, rows in sorted(chosen.items()):
            spare = [row for row in strata.get(key, []) if row not in rows]
            if rows and spare:
                longest = max(rows, key=lambda row: (row.tokens, row.id))
                shortest = min(spare, key=lambda row: (row.tokens, row.id))
                saved = longest.tokens - shortest.tokens
                if saved > 0 and (best is None or saved > best[0]):
                    best = saved, key, longest, shortest
        if best is None:
            raise InputError(
                f"requests have {total / params.count:.1f} tokens on average at the least, but mean_tokens "
                f"is {params.mean_tokens}: raise it to {math.ceil(total / params.count)}, or lower "
                "response_tokens, long_share or prompt_tokens"
            )
        saved, key, longest, shortest = best
        chosen[key] = [row for row in chosen[key] if row is not longest] + [shortest]
        total -= saved


def split_fit_holdout(rows: Sequence[TokenRow], params: PrepareRequests) -> list[str]:
    """ "fit" or "holdout" for each row, stratified by class, seeded. Raises InputError for a class without
    both.
    """
    random = np.random.default_rng([params.seed, 1])
    splits = ["fit"] * len(rows)
    for name in sorted({row.class_name for row in rows}):
        places = [place for place, row in enumerate(rows) if row.class_name == name]
        held = round(len(places) * params.holdout_share)
        if not 0 < held < len(places):
            raise InputError(
                f"class '{name}' has {len(places)} requests; with holdout_share {params.holdout_share} its "
                f"{'holdout' if held == 0 else 'fit'} split is empty: raise count, or move holdout_share "
                "toward 0.5"
            )
        for place in random.permutation(places)[:held]:
            splits[place] = "holdout"
    return splits

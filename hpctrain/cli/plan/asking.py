"""What is to be predicted: a profile's file, a configuration, and what the options change of it."""

from __future__ import annotations

import argparse

from hpctrain import log
from hpctrain.cli.plan.predicting import parse_ranks
from hpctrain.errors import ConfigError
from hpctrain.predict import Profile, read_profile

__all__ = ["check_given", "profile_from", "take_config"]


def take_config(args: argparse.Namespace) -> None:
    """Fill what no option says from the configuration, or with defaults."""
    args.steps, args.even_last, args.overlap = None, True, None
    if args.config is not None:
        from hpctrain.predict import read_asked

        asked = read_asked(args.config)
        for name in ("global_batch", "accumulate", "engine", "warmup_steps"):
            if getattr(args, name) is None:
                setattr(args, name, getattr(asked, name))
        if args.epochs is None:
            args.epochs, args.steps = asked.epochs, asked.steps
        if args.bucket_mib is None and asked.bucket_bytes is not None:
            args.bucket_mib = asked.bucket_bytes / 2**20
        args.drop_last = args.drop_last or asked.drop_last
        args.even_last, args.overlap = asked.even_last, asked.overlap
    if args.accumulate is None:
        args.accumulate = 1


def check_given(args: argparse.Namespace) -> None:
    """Whether there is enough to predict from."""
    measures = args.measure_profile is not None
    if not (args.profile or args.config) or not (measures or (args.machine and args.ranks)):
        raise ConfigError(
            "a prediction needs --profile or CONFIG.toml, and --machine and --ranks; see --help"
        )


def profile_from(args: argparse.Namespace) -> Profile:
    """Read the profile, or measure it from the configuration."""
    check_given(args)
    if args.profile:
        return read_profile(args.profile)
    from hpctrain.predict import measure_configured

    # At the most ranks: small batches use a processor less well than their share says.
    most = max(parse_ranks(args.ranks)) if args.ranks else 1
    batch = max(1, args.global_batch // args.accumulate // most)
    log.notice(f"measuring {args.config} with {batch} samples, the share of one of {most} ranks")
    return measure_configured(args.config, batch, repeats=args.repeats)

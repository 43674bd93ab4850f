"""Checks of a verifier's options before the target is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftwire.contract.addresses import parse_address
from draftwire.contract.client_security import ClientSecurity
from draftwire.contract.errors import InvalidArgumentError
from draftwire.contract.validation import parse_speculative_config
from draftwire.model.devices import choose_device
from draftwire.server.security import ServerSecurity
from draftwire.transport import check_rendezvous_dir, parse_carriers
from draftwire.v1 import config_pb2, draft_pb2
from verifier_service.options import VerifierOptions


@dataclass(frozen=True)
class Settings:
    """Checked options, resolved for this machine."""

    config: config_pb2.SpeculativeConfig
    device: torch.device
    drafters: list[str]  # HOST:PORT, without repetitions
    security: ServerSecurity  # towards clients
    drafter_security: ClientSecurity
    carriers: Sequence[draft_pb2.Carrier]
    draft_deadline_s: float | None  # None waits until a drafter answers or is lost
    async_scheduling: bool


def check_options(options: VerifierOptions) -> Settings:
    """Return the settings; raise DraftwireError for a wrong option."""
    config = parse_speculative_config(options.speculative_config)
    drafters = list(dict.fromkeys(address.strip() for address in options.drafters.split(",") if address.strip()))
    security, drafter_security = _security(options)
    for address in drafters:
        parse_address(address, "drafters")
        drafter_security.credentials(address, "drafters")
    parse_address(options.listen, "listen")
    security.credentials(options.listen)
    security.check_tokens()
    if options.metrics_listen is not None:
        security.tls_context(options.metrics_listen, "metrics_listen")
    if options.health_listen is not None:
        parse_address(options.health_listen, "health_listen")
    if options.served_model_name == "":
        raise InvalidArgumentError("served_model_name", "", "must not be empty")
    deadline_s = _deadline(options.draft_deadline_ms)
    carriers = parse_carriers(options.carriers)
    check_rendezvous_dir(options.rendezvous_dir)
    device = choose_device(options.device)
    if options.engine_process is False and options.tensor_parallel_size > 1 and device.type == "cuda":
        raise InvalidArgumentError("engine_process", False, "allowed: with tensor_parallel_size = 1, or on a CPU")
    return Settings(
        config=config,
        device=device,
        drafters=drafters,
        security=security,
        drafter_security=drafter_security,
        carriers=carriers,
        draft_deadline_s=deadline_s,
        async_scheduling=_schedules_ahead(options, device),
    )


def _security(options: VerifierOptions) -> tuple[ServerSecurity, ClientSecurity]:
    """Return the security settings towards clients and towards drafters."""
    server = ServerSecurity(
        options.tls_cert, options.tls_key, options.tls_client_ca, options.token_file, insecure=options.insecure
    )
    try:
        client = ClientSecurity(
            ca=options.drafter_tls_ca,
            certificate=options.drafter_tls_cert,
            key=options.drafter_tls_key,
            insecure=options.insecure,
        )
    except InvalidArgumentError as error:
        raise InvalidArgumentError("drafter_tls_cert", str(options.drafter_tls_cert), error.allowed) from error
    return server, client


def _schedules_ahead(options: VerifierOptions, device: torch.device) -> bool:
    """Return whether scheduling is asynchronous. By default it is not on a CPU, which computes during the launch; it
    never is with a split target, whose ranks get the tokens from the host."""
    is_split = options.tensor_parallel_size > 1
    if options.async_scheduling and is_split:
        raise InvalidArgumentError("async_scheduling", True, "allowed: with tensor_parallel_size = 1")
    return device.type == "cuda" and not is_split if options.async_scheduling is None else options.async_scheduling


def _deadline(text: str) -> float | None:
    """Return the seconds, or None for off."""
    if text == "off":
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = -1.0
    if not 0 <= milliseconds < float("inf"):
        raise InvalidArgumentError("draft_deadline_ms", text, 'allowed: "off" or milliseconds in [0, inf)')
    return milliseconds / 1000

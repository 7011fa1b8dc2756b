"""The roles of loaded versions. A swap is a change of pointers on the loop."""

from __future__ import annotations

from service.errors import NotFound, NotReady
from service.versions.loaded import LoadedVersion
from service.versions.rollout import Role, in_canary

ROLES: tuple[Role, ...] = ("primary", "canary", "shadow", "standby", "previous")
STABLE, CANARY = "stable", "canary"


class Versions:
    """Who holds which role: the primary answers, the canary a share of users.

    The shadow scores copies, the standby waits loaded, and the previous one is the way back.
    """

    def __init__(self) -> None:
        self.primary: LoadedVersion | None = None
        self.canary: LoadedVersion | None = None
        self.shadow: LoadedVersion | None = None
        self.standby: LoadedVersion | None = None
        self.previous: LoadedVersion | None = None
        self.canary_percent = 0.0
        self.fault = "no version has been loaded yet"
        """Why there is no primary."""

    def held(self) -> list[LoadedVersion]:
        """Every version with a role, each once."""
        found = [getattr(self, role) for role in ROLES]
        return list(dict.fromkeys(version for version in found if version is not None))

    def find(self, version: str) -> LoadedVersion | None:
        """The loaded version of this word, whatever its role."""
        return next((held for held in self.held() if held.version == version), None)

    def role_of(self, version: str) -> Role | None:
        """The first role that the version holds, the primary's before all others."""
        return next((role for role, held in self.names().items() if held == version), None)

    def names(self) -> dict[Role, str]:
        """The version in each role that is taken."""
        found = {role: getattr(self, role) for role in ROLES}
        return {role: held.version for role, held in found.items() if held is not None}

    def assign(self, role: Role, version: LoadedVersion | None) -> list[LoadedVersion]:
        """Give a role away; returns the versions that hold none any more, for retiring.

        A new primary gives up its other roles, and the old one becomes `previous`.
        """
        before = self.held()
        if role == "primary" and version is not self.primary:
            assert version is not None, "one primary always"
            for other in ROLES:
                if getattr(self, other) is version:
                    setattr(self, other, None)
            self.previous = self.primary or self.previous
        setattr(self, role, version)
        after = self.held()
        return [held for held in before if held not in after]

    def pick(self, wanted: str | None, user: str) -> LoadedVersion:
        """The version for a request's `model`: name, name@label or name@version.

        Without a label or version, the user's hash decides between primary and canary.
        Raises NotReady without a primary, NotFound for words that name nothing here.
        """
        primary, canary = self.primary, self.canary
        if primary is None:
            raise NotReady(f"no version is ready: {self.fault}")
        name, _, which = (wanted or primary.name).partition("@")
        if name != primary.name:
            raise NotFound(f"no model {name!r} is served here", field="model")
        if not which:
            if canary is not None and in_canary(user, canary.version, self.canary_percent):
                return canary
            return primary
        if which == STABLE:
            return primary
        found = canary if which == CANARY else self.find(which)
        if found is None:
            raise NotFound(f"model {name!r} has no label or version {which!r} here", field="model")
        return found

    async def close(self) -> None:
        """Retire all that is loaded."""
        held = self.held()
        self.fault = "the service is shutting down"
        for role in ROLES:
            setattr(self, role, None)
        for version in held:
            await version.retire()

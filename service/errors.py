"""The one tree of errors; it knows no HTTP.

RankerError
├── RequestFault          the caller's mistake: says which field, and why
│   ├── NotFound          an unknown model, version or label
│   ├── Conflict          somebody else has changed it meanwhile
│   ├── MalformedBody     not the JSON that it claims to be
│   ├── TooLarge          a body over the limit
│   ├── Unauthenticated   no credentials
│   └── Forbidden         wrong credentials
├── Refusal               a valid request that is not served now
│   ├── Overloaded        the queue would miss the deadline
│   ├── DeadlineExceeded  the deadline came first
│   ├── NotReady          no warm version, or draining
│   ├── SignalsMissing    fresh signals were insisted on and are not at hand
│   └── QuotaExceeded     this client's own limit
├── FleetFault            the wished state cannot be read or written: replicas stay as they are
├── SignalFault           Redis is away, slow or wrong: degrades, never a 5xx on /rank
├── BackendFault          an engine failed
│   ├── BackendRecoverable   the next batch may succeed
│   └── BackendLost          the device is gone for this process
└── BundleFault           a version that must not be served
    ├── ManifestFault     missing, unreadable or of another schema
    ├── PlanFault         an engine plan that is missing, of another host, or cannot be built
    ├── DigestFault       bytes differ from the manifest
    ├── SignatureFault    the manifest is not signed by the key that is trusted
    ├── StoreFault        the store cannot be read, or its copy cannot be written
    ├── NoHeadroom        two versions do not fit into memory beside each other
    └── GoldenFault       scores differ from the expected ones
"""


class RankerError(Exception):
    """Base of every error that this service raises on purpose."""


class RequestFault(RankerError):
    """The request is wrong; `field` is a path such as `items[3].id`, empty for the whole body."""

    def __init__(self, detail: str, *, field: str = "", code: str = "invalid_request") -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field
        self.code = code


class MalformedBody(RequestFault):
    """The body is not the JSON that it claims to be."""


class NotFound(RequestFault):
    """The named model, version or label does not exist here."""


class Conflict(RequestFault):
    """Somebody else has changed the same thing meanwhile."""


class TooLarge(RequestFault):
    """The body is larger than the limit."""


class Unauthenticated(RequestFault):
    """The route needs credentials, and none came."""


class Forbidden(RequestFault):
    """The credentials are not the right ones."""


class Refusal(RankerError):
    """A valid request that is not served now; `retry_after_s` says when to come back, 0 never."""

    def __init__(self, detail: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(detail)
        self.detail = detail
        self.retry_after_s = retry_after_s


class Overloaded(Refusal):
    """The queue is predicted to miss the deadline."""


class DeadlineExceeded(Refusal):
    """The deadline came before the scores."""


class NotReady(Refusal):
    """No version is warm, or the service is draining."""


class SignalsMissing(Refusal):
    """Fresh signals were insisted on and are not at hand."""


class QuotaExceeded(Refusal):
    """This client has used its quota up."""


class FleetFault(RankerError):
    """The fleet's wished state cannot be read or written."""


class SignalFault(RankerError):
    """The signal store did not answer, or not in time."""


class BackendFault(RankerError):
    """An engine failed; the whole batch fails as one."""


class BackendRecoverable(BackendFault):
    """The batch failed; the engine can take the next one."""


class BackendLost(BackendFault):
    """The engine cannot be used again in this process."""


class BundleFault(RankerError):
    """A bundle that must not be served."""


class ManifestFault(BundleFault):
    """The manifest is missing, unreadable or of another schema."""


class DigestFault(BundleFault):
    """A file's bytes differ from the manifest."""


class PlanFault(BundleFault):
    """An engine plan is missing, was built for something else, or cannot be built or loaded."""


class SignatureFault(BundleFault):
    """The manifest is not signed with the trusted key."""


class StoreFault(BundleFault):
    """The store cannot be read, or its local copy cannot be written."""


class NoHeadroom(BundleFault):
    """There is no memory for this version beside the ones that are loaded."""


class GoldenFault(BundleFault):
    """The golden requests do not give the expected scores."""

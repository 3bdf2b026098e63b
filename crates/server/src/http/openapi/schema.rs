//! Schemas of values that several wire types share. The types exist only for the document: fields refer to them with
//! `value_type`.

use utoipa::openapi::RefOr;
use utoipa::openapi::schema::{KnownFormat, ObjectBuilder, Schema, SchemaFormat, SchemaType, Type};
use utoipa::{PartialSchema, ToSchema};
use weir_core::request::state;
use weir_core::tier::{Plan, Tier};

/// No control characters (`weir_core::id::check_name`).
const NAME: &str = r"^[^\u0000-\u001F\u007F-\u009F]+$";

/// Defines a type that stands for a kind of string.
macro_rules! text {
    ($(#[doc = $about:literal])+ $name:ident, $example:literal, $($keyword:ident($value:expr)),*) => {
        $(#[doc = $about])+
        pub(crate) enum $name {}

        impl PartialSchema for $name {
            fn schema() -> RefOr<Schema> {
                let about = [$($about.trim()),+].join(" ");
                let schema = ObjectBuilder::new().schema_type(Type::String).description(Some(about)).examples([$example]);
                schema$(.$keyword(Some($value)))*.into()
            }
        }

        impl ToSchema for $name {}
    };
}

text!(
    /// A user: 1 to 255 characters, none of them a control character.
    UserId, "alice", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// An event. Ids are global: the same id is the same event, whatever time or config comes with it. 1 to 255
    /// characters, none of them a control character.
    EventId, "payment-000001", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// The config that says how many events run in a window: 1 to 255 characters, none of them a control character.
    ConfigName, "default", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// The name of a policy: 1 to 255 characters, none of them a control character.
    PolicyName, "login", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// Whose limit it is, such as a user, an address or an API key: 1 to 255 characters, none of them a control
    /// character.
    LimitKey, "10.0.0.1", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// A caller's name for one submission: 1 to 255 characters, none of them a control character.
    IdempotencyKey, "order-4711", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// The kind of work of a request, which selects its downstream. 1 to 255 characters, none of them a control character.
    RequestType, "payment", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// A tenant: 1 to 255 characters without control characters.
    TenantName, "acme", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// The name of a product: 1 to 255 characters, none of them a control character.
    ProductName, "Limited Edition Widget", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// A descriptor's domain, key or value: 1 to 255 characters, none of them a control character.
    DescriptorText, "edge", min_length(1), max_length(255), pattern(NAME)
);
text!(
    /// A product, and its sale.
    Sku, "WIDGET-001", pattern("^[A-Za-z0-9-]{1,64}$")
);
text!(
    /// A time with `Z` or an offset, in the years 1 to 9998. Digits below a microsecond are dropped.
    Time, "2026-06-01T12:00:00Z", format(SchemaFormat::KnownFormat(KnownFormat::DateTime)), pattern("^(?!0000|9999)")
);
text!(
    /// A calendar day in the years 1 to 9999.
    Day, "2026-01-31", format(SchemaFormat::KnownFormat(KnownFormat::Date)), pattern("^(?!0000)[0-9]{4}-[0-9]{2}-[0-9]{2}$")
);
text!(
    /// An ISO 8601 duration of fixed length, such as `PT4S`, `PT0.25S` or `P1D`: whole milliseconds from 1 ms to 366
    /// days. A day is 24 hours and a week 7 days; months and years have no fixed length and are refused.
    FixedDuration, "PT1M", pattern("^[Pp]([0-9]+[Ww])?([0-9]+[Dd])?([Tt]([0-9]+[Hh])?([0-9]+[Mm])?([0-9]+([.,][0-9]+)?[Ss])?)?$")
);
text!(
    /// `ACCEPTED`: on disk, its job is queued. `PENDING_ENQUEUE`: on disk, the broker does not have its job yet.
    /// `IN_PROGRESS`: being called, waiting for its next attempt, or for the downstream's callback. Final: `COMPLETED`,
    /// `FAILED_PERMANENT` (the downstream refused it), `FAILED_RETRY_EXHAUSTED` (a dead letter; an operator may replay
    /// it), `CANCELLED` (its tenant has cancelled it).
    RequestStatus, "COMPLETED", enum_values(state::RequestStatus::ALL.map(state::RequestStatus::as_str))
);
text!(
    /// The plan that a user subscribes to.
    PlanName, "PRO_MONTHLY", enum_values(Plan::ALL.map(Plan::as_str))
);
text!(
    /// The tier that a plan selects.
    TierName, "pro", enum_values(Tier::ALL.map(Tier::as_str))
);
text!(
    /// `UPCOMING` until `startTime`, then `ACTIVE` until `endTime` or until the last unit is sold, then `ENDED`.
    SaleState, "ACTIVE", enum_values(["UPCOMING", "ACTIVE", "ENDED"])
);

/// Why a sale has ended: its last unit was sold, its time was over, or an operator ended it. Null until then.
pub(crate) struct EndReason;

impl PartialSchema for EndReason {
    fn schema() -> RefOr<Schema> {
        let names = [Some("SOLD_OUT"), Some("TIME_EXPIRED"), Some("ENDED_BY_OPERATOR"), None];
        let types = SchemaType::from_iter([Type::String, Type::Null]);
        ObjectBuilder::new().schema_type(types).enum_values(Some(names)).into()
    }
}

impl ToSchema for EndReason {}

text!(
    /// Counted and enqueued.
    SendStatus, "QUEUED", enum_values(["QUEUED"])
);
text!(
    /// Whether this call assigned the slot or found an existing one.
    SlotStatus, "NEW", enum_values(["NEW", "EXISTING"])
);
text!(
    /// Whether a window takes more events. An `OPEN` window may still refuse events whose time is late in it.
    WindowStatus, "OPEN", enum_values(["OPEN", "CLOSED"])
);
text!(
    /// What a downstream reports.
    CallbackStatus, "COMPLETED", enum_values(["COMPLETED", "FAILED"])
);
text!(
    /// How checks are decided while Redis cannot be reached: `local` counts on each server, `open` allows all, `closed`
    /// denies all.
    OnOutage, "local", enum_values(["local", "open", "closed"])
);
text!(
    /// `degraded` when any check is down.
    HealthStatus, "healthy", enum_values(["healthy", "degraded"])
);
text!(
    /// `degraded` when some capabilities cannot be served, `unavailable` when none can.
    ReadinessStatus, "ready", enum_values(["ready", "degraded", "unavailable"])
);
text!(
    /// A capability.
    CapabilityName, "quota", enum_values(["quota", "slot", "request", "tier", "sale"])
);
text!(
    /// Whether the engine answered.
    EngineStatus, "up", enum_values(["up", "down"])
);
text!(
    /// Whether the clock has recently stepped by more than a second; `unknown` until it has been read.
    ClockStatus, "steady", enum_values(["steady", "stepped", "unknown"])
);

/// The schemas that parameters refer to. `utoipa` finds those of bodies itself.
pub(crate) fn shared() -> impl Iterator<Item = (String, RefOr<Schema>)> {
    fn named<T: ToSchema>() -> (String, RefOr<Schema>) {
        (T::name().into_owned(), T::schema())
    }
    let texts = [
        named::<UserId>(),
        named::<TenantName>(),
        named::<EventId>(),
        named::<ConfigName>(),
        named::<PolicyName>(),
        named::<LimitKey>(),
        named::<Sku>(),
        named::<Time>(),
        named::<RequestStatus>(),
        named::<TierName>(),
        named::<CapabilityName>(),
    ];
    texts.into_iter().chain(super::responses::schemas())
}

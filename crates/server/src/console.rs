//! The operators' console: what it shows live, and its page. The screens read everything else over the same API as everybody.

pub(crate) mod history;
pub(crate) mod live;
pub(crate) mod routes;
pub(crate) mod sampler;
pub(crate) mod servers;

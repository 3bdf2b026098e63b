//! The AI gateway. Tests are both the caller and the upstream, so that they can check each step on the other side before
//! they take the next.

mod answers;
mod bodies;
mod crowd;
mod disconnects;
mod failures;
mod fixtures;
mod headers;
mod limits;
mod paths;
mod smuggling;
mod tls;
mod tunnels;

//! AI calls: what reaches the upstream, what comes back, and when. The test plays both the caller and the upstream, so
//! that each step is seen on the other side before the next is taken.

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

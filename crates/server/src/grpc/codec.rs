//! The codec of gRPC messages. It answers `INVALID_ARGUMENT` to a message that cannot be decoded, because that is the caller's
//! mistake; the decoder of `tonic-prost` answers `INTERNAL`.

use std::marker::PhantomData;

use prost::Message;
use tonic::Status;
use tonic::codec::{Codec, DecodeBuf, Decoder};
use tonic_prost::ProstEncoder;

/// Encodes `E` and decodes `D`. Generated code creates one for each call.
pub(super) struct ServerCodec<E, D>(PhantomData<(E, D)>);

impl<E, D> Default for ServerCodec<E, D> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<E: Message + Send + 'static, D: Message + Default + Send + 'static> Codec for ServerCodec<E, D> {
    type Encode = E;
    type Decode = D;
    type Encoder = ProstEncoder<E>;
    type Decoder = RequestDecoder<D>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstEncoder::default()
    }

    fn decoder(&mut self) -> Self::Decoder {
        RequestDecoder(PhantomData)
    }
}

pub(super) struct RequestDecoder<D>(PhantomData<D>);

impl<D: Message + Default> Decoder for RequestDecoder<D> {
    type Item = D;
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<D>, Status> {
        let malformed = |error| Status::invalid_argument(format!("the message cannot be decoded: {error}"));
        D::decode(buffer).map(Some).map_err(malformed)
    }
}

"""Calls a server with a client generated from the .proto files. Reads one JSON request a line, prints one response a line."""

import json
import sys
import tempfile

import grpc
from google.protobuf.json_format import MessageToDict
from grpc_tools import protoc

address, protocols = sys.argv[1:3]
made = tempfile.mkdtemp()
sources = [
    "envoy/service/ratelimit/v3/rls.proto",
    "envoy/extensions/common/ratelimit/v3/ratelimit.proto",
    "envoy/config/core/v3/base.proto",
    "envoy/type/v3/ratelimit_unit.proto",
    "grpc/health/v1/health.proto",
]
# In a descriptor pool of their own, so that they do not shadow gRPC's own modules.
well_known = protoc.__file__.rsplit("/", 1)[0] + "/_proto"
options = [f"--proto_path={protocols}", f"--proto_path={well_known}", f"--descriptor_set_out={made}/set", "--include_imports"]
assert protoc.main(["protoc", *options, *sources]) == 0

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

pool = descriptor_pool.DescriptorPool()
with open(f"{made}/set", "rb") as file:
    for each in descriptor_pb2.FileDescriptorSet.FromString(file.read()).file:
        pool.Add(each)


def message(name):
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


def method(channel, path, request, response):
    return channel.unary_unary(
        path, request_serializer=lambda m: m.SerializeToString(), response_deserializer=message(response).FromString
    )


channel = grpc.insecure_channel(address)
health = method(channel, "/grpc.health.v1.Health/Check", "grpc.health.v1.HealthCheckRequest", "grpc.health.v1.HealthCheckResponse")
ask = method(
    channel,
    "/envoy.service.ratelimit.v3.RateLimitService/ShouldRateLimit",
    "envoy.service.ratelimit.v3.RateLimitRequest",
    "envoy.service.ratelimit.v3.RateLimitResponse",
)
Request = message("envoy.service.ratelimit.v3.RateLimitRequest")
HealthRequest = message("grpc.health.v1.HealthCheckRequest")

for service in ["", "envoy.service.ratelimit.v3.RateLimitService"]:
    print(json.dumps(MessageToDict(health(HealthRequest(service=service), timeout=30))), flush=True)
for line in sys.stdin:
    request = Request()
    from google.protobuf.json_format import ParseDict

    ParseDict(json.loads(line), request, descriptor_pool=pool)
    try:
        print(json.dumps(MessageToDict(ask(request, timeout=30))), flush=True)
    except grpc.RpcError as error:
        print(json.dumps({"error": error.code().name}), flush=True)

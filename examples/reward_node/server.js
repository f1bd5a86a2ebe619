// A reward model in Node.js, made from the proto files alone: right answers earn one, minus a penalty for length.
//
// Usage: node server.js [HOST:PORT]       (default 127.0.0.1:7311)
"use strict";

const fs = require("node:fs");
const path = require("node:path");
const grpc = require("@grpc/grpc-js");
const protoLoader = require("@grpc/proto-loader");

const PROTOS = process.env.PENSTOCK_PROTOS || path.join(__dirname, "..", "..", "protos");
const MAX_BATCH_SIZE = 64;
const MAX_PENALTY = 0.2;
const FREE_CHARACTERS = 400;

function judge(item) {
  if (!item.answer) {
    // Never a made-up value: a sample that cannot be judged has a status instead.
    return { status: "SCORE_STATUS_INVALID", message: "this row has no reference answer" };
  }
  const lines = item.completionText.trim().split(/\r?\n/);
  const given = lines[lines.length - 1].replace(/^####/, "").trim();
  const correct = given === item.answer.trim() ? 1 : 0;
  const penalty = MAX_PENALTY * Math.min(1, item.completionText.length / FREE_CHARACTERS);
  // Of a sample that talked with an environment completionText has the model's words alone, and completionTurns all;
  // it is empty where the model wrote everything.
  const turns = item.completionTurns.filter((turn) => turn.role === "assistant").length || 1;
  const components = { correct, penalty, turns };
  return { status: "SCORE_STATUS_OK", value: correct - penalty, components, model: "brevity-node" };
}

function score(call, respond) {
  const { items } = call.request;
  if (items.length < 1 || items.length > MAX_BATCH_SIZE) {
    const details = `items: ${items.length} items, must be 1 to ${MAX_BATCH_SIZE}`;
    respond({ code: grpc.status.INVALID_ARGUMENT, details });
    return;
  }
  respond(null, { scores: items.map(judge) });
}

function getRewardModel(_call, respond) {
  respond(null, { name: "brevity-node", maxBatchSize: MAX_BATCH_SIZE, version: "1" });
}

function load(file, directory) {
  const options = { keepCase: false, longs: Number, enums: String, defaults: true, includeDirs: [directory] };
  return grpc.loadPackageDefinition(protoLoader.loadSync(file, options));
}

function main(listen) {
  const server = new grpc.Server({ "grpc.max_receive_message_length": 16 * 1024 * 1024 });
  const { RewardService } = load("penstock/v1/reward.proto", PROTOS).penstock.v1;
  server.addService(RewardService.service, { score, getRewardModel });
  // Health is what load balancers and `penstock reward check` look at; its proto is beside this file.
  const { Health } = load("health.proto", __dirname).grpc.health.v1;
  server.addService(Health.service, { check: (_call, respond) => respond(null, { status: "SERVING" }) });
  server.bindAsync(listen, grpc.ServerCredentials.createInsecure(), (error, port) => {
    if (error) {
      console.error(`cannot listen on ${listen}: ${error.message}`);
      process.exit(1);
    }
    console.log(`reward model is served on ${listen.replace(/:\d+$/, "")}:${port}`);
  });
  for (const signal of ["SIGTERM", "SIGINT"]) {
    process.once(signal, () => {
      // Calls in progress end first; those that last longer than five seconds are cut off.
      setTimeout(() => server.forceShutdown(), 5000).unref();
      server.tryShutdown(() => process.exit(0));
    });
  }
}

if (!fs.existsSync(path.join(PROTOS, "penstock", "v1", "reward.proto"))) {
  console.error(`no penstock/v1/reward.proto under ${PROTOS}; set PENSTOCK_PROTOS to the folder of Penstock's protos`);
  process.exit(2);
}
main(process.argv[2] || "127.0.0.1:7311");

// SPDX-License-Identifier: Apache-2.0
// Draws the lanes: each gradient by itself, or the shares of what a worker did in each bucket of time.

import {colours, pattern} from './theme.js';

// Categories from the bottom of a bar to its top; a wait is a lower bar, a hold and a drop have a pattern.
const STACK = [
  ['accepted', ['accepted_secs']], ['dropped', ['dropped_secs', 'lost_secs']], ['wait', ['wait_secs']], ['held', ['held_secs']],
];

export function drawBuckets(pen, data, place, laneHeight, top, scale) {
  const height = laneHeight - 1, step = data.buckets * data.workers;
  const channel = Object.fromEntries(data.channels.map((name, i) => [name, i * step]));
  const base = new Float32Array(step);
  for (const [name, channels] of STACK) {
    const path = new Path2D();
    for (let bucket = 0; bucket < data.buckets; bucket++) {
      const left = place(data.begin + bucket * data.secs), right = place(data.begin + (bucket + 1) * data.secs);
      for (let worker = 0; worker < data.workers; worker++) {
        const cell = bucket * data.workers + worker;
        let secs = 0;
        for (const each of channels) secs += data.cells[channel[each] + cell];
        const low = base[cell], high = Math.min(1, low + secs / data.secs);
        if (high - low < 0.01) continue;
        base[cell] = high;
        path.rect(left, top + worker * laneHeight + height * (1 - high), right - left + 0.25, height * (high - low));
      }
    }
    fill(pen, path, name, scale);
  }
  crosses(pen, colours().lost, laneHeight, function* () {
    for (let cell = 0; cell < step; cell++) {
      if (data.cells[channel.lost + cell] < 0.5) continue;
      const bucket = Math.floor(cell / data.workers), worker = cell % data.workers;
      yield [place(data.begin + (bucket + 0.5) * data.secs), top + (worker + 0.5) * laneHeight];
    }
  });
}

export function drawGradients(pen, data, place, laneHeight, top, scale) {
  const height = laneHeight - 1;
  const paths = Object.fromEntries(['accepted', 'dropped', 'wait', 'held'].map(name => [name, new Path2D()]));
  const bar = (name, worker, begin, end, part) => {
    const left = place(data.begin + begin), right = place(data.begin + end);
    if (right > left) {
      const size = height * part;
      paths[name].rect(left, top + worker * laneHeight + (height - size) / 2, Math.max(0.6, right - left - 0.4), size);
    }
  };
  const waited = new Map();
  for (let i = 0; i < data.worker.length; i++) {
    const worker = data.worker[i], idle = waited.get(worker) ?? -Infinity;
    bar('held', worker, Math.max(data.start[i] - data.held[i], idle), data.start[i], 0.5);
    bar(data.outcome[i] ? 'dropped' : 'accepted', worker, data.start[i], data.arrival[i], 1);
    if (!data.outcome[i]) bar('wait', worker, data.arrival[i], data.update[i], 0.5);
    waited.set(worker, data.outcome[i] ? data.arrival[i] : data.update[i]);
  }
  for (const [name, path] of Object.entries(paths)) fill(pen, path, name, scale);
  // Updates are thin lines through all lanes.
  pen.strokeStyle = colours().text;
  pen.globalAlpha = data.update_time.length > 150 ? 0.15 : 0.45;
  pen.lineWidth = 1;
  pen.beginPath();
  for (const time of data.update_time) {
    const x = Math.round(place(data.begin + time)) + 0.5;
    pen.moveTo(x, top);
    pen.lineTo(x, top + data.workers * laneHeight);
  }
  pen.stroke();
  pen.globalAlpha = 1;
  crosses(pen, colours().lost, laneHeight, function* () {
    for (let i = 0; i < data.worker.length; i++) {
      if (data.outcome[i] === 2) yield [place(data.begin + data.arrival[i]), top + (data.worker[i] + 0.5) * laneHeight];
    }
  });
}

function fill(pen, path, name, scale) {
  if (name === 'dropped' || name === 'held') {
    pen.fillStyle = pattern(pen, name, scale);
    // The tile is in pixels of the screen.
    pen.fillStyle.setTransform(new DOMMatrix().scale(1 / scale));
  } else {
    pen.fillStyle = colours()[name];
  }
  pen.fill(path);
}

function crosses(pen, colour, laneHeight, places) {
  const half = Math.min(5, laneHeight / 2.5);
  pen.strokeStyle = colour;
  pen.lineWidth = 1.8;
  pen.beginPath();
  for (const [x, y] of places()) {
    pen.moveTo(x - half, y - half);
    pen.lineTo(x + half, y + half);
    pen.moveTo(x - half, y + half);
    pen.lineTo(x + half, y - half);
  }
  pen.stroke();
}

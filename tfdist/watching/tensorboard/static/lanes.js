// SPDX-License-Identifier: Apache-2.0
// Draws the lanes: each gradient by itself, or the shares of what a worker did in each bucket of time.

import {colours} from './theme.js';

// Categories from the bottom of a bar to its top; a wait is a lower bar; input, a hold and a drop have a pattern.
const STACK = [
  ['input', ['input_secs']], ['accepted', ['accepted_secs']], ['dropped', ['dropped_secs', 'lost_secs']],
  ['wait', ['wait_secs']], ['reduce', ['reduce_secs']], ['held', ['held_secs']],
];

// Kept from one drawing to the next: it has megabytes.
let picture = null;

// Draws pixel by pixel: tens of thousands of bars as paths would take longer than a frame.
export function drawBuckets(pen, data, place, lanes, laneHeight, top, scale, chosen) {
  const step = data.buckets * data.workers, palette = colours();
  const channel = Object.fromEntries(data.channels.map((name, i) => [name, i * step]));
  const left = Math.round(place.left * scale), width = Math.round(place.width * scale);
  const rows = Math.round(data.workers * laneHeight * scale);
  if (!picture || picture.width !== width || picture.height !== rows) picture = pen.createImageData(width, rows);
  const pixels = new Uint32Array(picture.data.buffer).fill(0);
  const inks = STACK.map(([name]) => [packed(palette[name]), packed(palette.pattern), MARKS[name]]);
  for (let worker = 0; worker < data.workers; worker++) {
    const lane = lanes[worker];
    const first = Math.round(lane * laneHeight * scale), last = Math.round(((lane + 1) * laneHeight - 1) * scale);
    pixels.fill(packed(worker === chosen ? palette.line : palette.lane), first * width, last * width);
    for (let bucket = 0; bucket < data.buckets; bucket++) {
      const cell = bucket * data.workers + worker;
      const from = Math.max(0, Math.round(place(data.begin + bucket * data.secs) * scale) - left);
      const to = Math.min(width, Math.round(place(data.begin + (bucket + 1) * data.secs) * scale) - left);
      let part = 0, bottom = last;
      for (let i = 0; i < STACK.length && to > from; i++) {
        for (const name of STACK[i][1]) part += data.cells[channel[name] + cell] / data.secs;
        const upper = Math.max(first, last - Math.round(Math.min(1, part) * (last - first)));
        const [ink, other, hatch] = inks[i];
        // A thin bar has no room for a hatch.
        const mark = bottom - upper >= 4 * scale ? hatch : null;
        for (let y = upper; y < bottom; y++) {
          for (let x = from; x < to; x++) pixels[y * width + x] = mark && mark(x / scale, y / scale) ? other : ink;
        }
        bottom = Math.min(bottom, upper);
      }
    }
  }
  pen.putImageData(picture, left, Math.round(top * scale));
  crosses(pen, palette.lost, laneHeight, function* () {
    for (let cell = 0; cell < step; cell++) {
      if (data.cells[channel.lost + cell] < 0.5) continue;
      const bucket = Math.floor(cell / data.workers), worker = cell % data.workers;
      yield [place(data.begin + (bucket + 0.5) * data.secs), top + (lanes[worker] + 0.5) * laneHeight];
    }
  });
}

// Where a hatch or a dot is, of both drawings.
const MARKS = {
  input: (x, y) => y % 4 < 1,
  dropped: (x, y) => (x + y) % 6 < 1.5,
  held: (x, y) => x % 4 < 2 && y % 4 < 2,
};

function packed(hex) {
  const value = parseInt(hex.slice(1), 16);
  return (0xff000000 | (value & 0xff) << 16 | (value & 0xff00) | value >> 16) >>> 0;
}

// What the workers did with each gradient: its index, the category, begin, end and height of a bar.
export function* bars(data) {
  const waited = new Map();
  for (let i = 0; i < data.worker.length; i++) {
    const worker = data.worker[i], isAccepted = !data.outcome[i], start = data.start[i], arrival = data.arrival[i];
    const read = Math.min(start + data.input[i], arrival), summing = Math.max(data.update[i] - data.reduce[i], arrival);
    yield [i, 'held', Math.max(start - data.held[i], waited.get(worker) ?? -Infinity), start, 0.5];
    yield [i, 'input', start, read, 0.8];
    yield [i, isAccepted ? 'accepted' : 'dropped', read, arrival, 1];
    if (isAccepted) {
      yield [i, 'wait', arrival, summing, 0.5];
      yield [i, 'reduce', summing, data.update[i], 0.25];
    }
    waited.set(worker, isAccepted ? data.update[i] : arrival);
  }
}

export function drawGradients(pen, data, place, lanes, laneHeight, top, scale) {
  const height = laneHeight - 1;
  const paths = Object.fromEntries(STACK.map(([name]) => [name, new Path2D()]));
  for (const [i, name, begin, end, part] of bars(data)) {
    const left = place(data.begin + begin), right = place(data.begin + end), size = height * part;
    if (right <= left) continue;
    paths[name].rect(left, top + lanes[data.worker[i]] * laneHeight + (height - size) / 2, Math.max(0.6, right - left - 0.4), size);
  }
  for (const [name, path] of Object.entries(paths)) {
    pen.fillStyle = MARKS[name] ? pattern(pen, name, scale) : colours()[name];
    pen.fill(path);
  }
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
      if (data.outcome[i] === 2) yield [place(data.begin + data.arrival[i]), top + (lanes[data.worker[i]] + 0.5) * laneHeight];
    }
  });
}

// The hatch of a category as a tile, in pixels of the screen.
function pattern(pen, name, scale) {
  const size = Math.round(12 * scale), tile = new OffscreenCanvas(size, size), inner = tile.getContext('2d');
  const hatched = inner.createImageData(size, size), palette = colours();
  new Uint32Array(hatched.data.buffer).forEach((_, i, pixels) => {
    pixels[i] = packed(MARKS[name](i % size / scale, Math.floor(i / size) / scale) ? palette.pattern : palette[name]);
  });
  inner.putImageData(hatched, 0, 0);
  const made = pen.createPattern(tile, 'repeat');
  made.setTransform(new DOMMatrix().scale(1 / scale));
  return made;
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

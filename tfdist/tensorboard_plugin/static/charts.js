// SPDX-License-Identifier: Apache-2.0
// Charts over the same window of time: updates, examples and waiting per second, and bytes per second by task.

import {getJson} from './api.js';
import {element, empty, bytes, digits, secs, short, ticks, timeTicks, tickSecs} from './format.js';

const NS = 'http://www.w3.org/2000/svg';
const HEIGHT = 170, LEFT = 62, RIGHT = 10, TOP = 10, BOTTOM = 24;
const MOST_LINES = 8;

export class Charts {
  constructor(timeWindow) {
    this.window = timeWindow;
    this.data = null;
    this.series = [];
    this.job = null;
    this.speed = chart('speed', 'Updates per second');
    this.examples = chart('examples', 'Examples per second');
    this.bytes = chart('bytes', 'Bytes per second');
    this.root = element('section', {'aria-label': 'Throughput and bytes', class: 'charts'},
      [this.speed.root, this.examples.root, this.bytes.root]);
  }

  setJob(job, isOther) {
    this.job = job;
    if (isOther) { this.data = null; this.series = []; }
  }

  setWindow(data) { this.data = data; }

  async loadBytes(job) {
    const {series} = await getJson('bytes', {job: job.id});
    if (this.job.id !== job.id) return;
    // The lines that are highest; a figure with more can't be read.
    const size = each => Math.max(...each.points.map(point => Math.abs(point[2])), 0);
    this.all = series.length;
    this.series = series.sort((one, other) => size(other) - size(one)).slice(0, MOST_LINES);
    this.draw();
  }

  draw() {
    if (!this.job) return;
    const {begin, end, low} = this.window;
    if (this.data) {
      this.line(this.speed, 'updates', 'updates/s');
      this.line(this.examples, 'examples', 'examples/s');
      this.examples.root.hidden = !this.data.totals.some((value, i) => value > 0 && Math.floor(i / this.data.buckets) === 1);
    }
    this.bytes.svg.toggleAttribute('hidden', !this.series.length);
    lines(this.bytes, this.series.map(each => ({
      name: `${each.name} ${each.direction}`, points: each.points.map(point => [point[0], point[2]]),
    })), {begin, end, low, format: bytes, named: true});
    const mean = 'each point is the mean since the point before';
    this.bytes.note.textContent = !this.series.length ? 'Telemetry has written no bytes for this run.'
      : this.all > this.series.length ? `the ${this.series.length} largest of ${this.all} lines; ${mean}` : mean;
    this.bytes.root.dataset.series = this.series.length;
  }

  line(target, name, unit) {
    const {data} = this, {begin, end, low} = this.window;
    const row = data.update_channels.indexOf(name) * data.buckets;
    const wait = data.update_channels.indexOf('update_wait_secs') * data.buckets;
    const updates = data.update_channels.indexOf('updates') * data.buckets;
    // Buckets with less than some updates each would show their rhythm and not their rate.
    let total = 0, waited = 0, all = 0;
    for (let i = 0; i < data.buckets; i++) {
      total += data.totals[row + i];
      all += data.totals[updates + i];
      waited += data.totals[wait + i];
    }
    const joined = Math.max(3, Math.min(data.buckets, Math.ceil(data.buckets / Math.max(1, all / 8))));
    const points = [];
    for (let i = 0; i < data.buckets; i += joined) {
      const last = Math.min(data.buckets, i + joined);
      let sum = 0;
      for (let each = i; each < last; each++) sum += data.totals[row + each];
      const rate = sum / ((last - i) * data.secs);
      points.push([data.begin + i * data.secs, rate], [data.begin + last * data.secs, rate]);
    }
    lines(target, [{name, points}], {begin, end, low, format: digits});
    const length = data.end - data.begin;
    target.note.textContent = `${digits(total / length)} ${unit} in this window` +
      (name === 'updates' && all > 0 ? `; an update waited ${secs(waited / all)} for gradients` : '');
    target.root.dataset.total = total;
  }
}

function chart(id, title) {
  const svg = document.createElementNS(NS, 'svg');
  svg.setAttribute('height', HEIGHT);
  svg.setAttribute('role', 'img');
  svg.setAttribute('aria-label', title);
  const note = element('p', {class: 'hint', id: `${id}-note`}), names = element('ul', {class: 'legend lines'});
  return {svg, note, names, root: element('figure', {id}, [element('h2', {text: title}), svg, names, note])};
}

function lines(target, series, {begin, end, low, format, named}) {
  const {svg} = target, WIDTH = svg.parentElement.clientWidth || 500;
  empty(svg);
  empty(target.names);
  const place = time => LEFT + (time - begin) / (end - begin) * (WIDTH - LEFT - RIGHT);
  const shown = series.map(each => ({...each, points: inside(each.points, begin - 1e-6, end + 1e-6)}));
  const most = Math.max(...shown.flatMap(each => each.points.map(point => point[1])), 0) * 1.05 || 1;
  const height = value => HEIGHT - BOTTOM - value / most * (HEIGHT - TOP - BOTTOM);
  for (const value of ticks(0, most, 4).values) {
    drawn(svg, 'line', {class: 'grid', x1: LEFT, x2: WIDTH - RIGHT, y1: height(value), y2: height(value)});
    drawn(svg, 'text', {x: LEFT - 6, y: height(value) + 4, 'text-anchor': 'end'}).textContent = format(value);
  }
  const axis = timeTicks(begin - low, end - low, 5);
  for (const value of axis.values) {
    const x = place(low + value);
    drawn(svg, 'text', {x, y: HEIGHT - 6, 'text-anchor': x > WIDTH - 40 ? 'end' : 'middle'}).textContent = tickSecs(value, axis.step);
  }
  shown.forEach((each, i) => {
    const path = each.points.map((point, k) => `${k ? 'L' : 'M'}${place(point[0]).toFixed(1)},${height(point[1]).toFixed(1)}`);
    drawn(svg, 'path', {class: `line line${i % MOST_LINES}`, d: path.join(''), 'data-name': each.name});
    if (named) {
      const sample = document.createElementNS(NS, 'svg');
      sample.setAttribute('class', 'sample');
      drawn(sample, 'path', {class: `line line${i % MOST_LINES}`, d: 'M0,5L28,5'});
      target.names.append(element('li', {}, [sample, element('span', {text: short(each.name, 60)})]));
    }
  });
}

// The points of a line between two times; where it enters and leaves, a point between its neighbours.
function inside(points, begin, end) {
  const kept = [];
  points.forEach((point, i) => {
    const before = points[i - 1];
    for (const time of before ? [begin, end] : []) {
      if (before[0] < time && time < point[0]) {
        kept.push([time, before[1] + (time - before[0]) / (point[0] - before[0]) * (point[1] - before[1])]);
      }
    }
    if (point[0] >= begin && point[0] <= end) kept.push(point);
  });
  return kept;
}

function drawn(parent, tag, attributes) {
  const made = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  parent.append(made);
  return made;
}

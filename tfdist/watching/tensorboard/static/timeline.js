// SPDX-License-Identifier: Apache-2.0
// The timeline of updates and the heat map of staleness: two canvases with one lane per worker and a common time axis.

import {getBlock, latest} from './api.js';
import {element, empty, digits, secs, short, timeTicks, tickSecs} from './format.js';
import {colours, viridis} from './theme.js';
import {bars, drawBuckets, drawGradients} from './lanes.js';
import {fitting, labels, legend, rows, KINDS} from './timeline_texts.js';

const LEFT = 132, RIGHT = 12, AXIS = 38;
const OUTCOMES = ['accepted', 'late and dropped', 'lost'];
const DOING = {held: 'held back', wait: 'waiting for the update', reduce: 'waiting for the update'};

export class Timeline {
  constructor(timeWindow) {
    this.window = timeWindow;
    this.job = null;
    this.data = null;
    this.events = [];
    // Workers by lane, and lanes by worker.
    this.order = [];
    this.laneOf = [];
    this.slow = new Set();
    this.isStale = false;
    this.chosen = null;
    this.request = latest(parameters => getBlock('window', parameters));
    this.live = element('div', {class: 'sr-only', 'aria-live': 'polite'});
    this.details = element('dl', {class: 'details', id: 'details'});
    this.range = element('span', {class: 'range', id: 'range'});
    this.lanes = this.canvas('lanes', 'Timeline of updates, one lane per worker. Arrow keys pan, plus and minus zoom, ' +
      'up and down choose a worker, 0 shows everything.');
    this.heat = this.canvas('heat', 'Heat map of the staleness of gradients, worker by time.');
    this.tip = element('div', {class: 'tip', id: 'tip', role: 'tooltip', hidden: ''});
    this.exact = element('p', {class: 'hint'});
    this.scale = element('div', {class: 'scale'});
    this.legend = element('ul', {class: 'legend', 'aria-label': 'Legend'});
    this.staleness = element('div', {id: 'staleness'}, [
      element('div', {class: 'bar'}, [element('h2', {text: 'Staleness of gradients'}), this.scale]), this.heat,
    ]);
    this.root = element('section', {'aria-label': 'Timeline'}, [
      element('div', {class: 'bar'}, [element('h2', {text: 'Timeline of updates'}), this.range, ...this.buttons()]),
      this.legend, this.lanes, this.exact, this.details, this.staleness, this.tip, this.live,
    ]);
  }

  canvas(id, label) {
    const made = element('canvas', {id, tabindex: '0', role: 'application', 'aria-label': label});
    this.window.listen(made, () => this.plot(made));
    made.addEventListener('keydown', event => this.key(event));
    made.addEventListener('pointermove', event => { if (!this.window.drag) this.point(made, event); });
    made.addEventListener('pointerleave', () => this.hide());
    made.addEventListener('click', event => {
      const worker = this.workerAt(event.offsetY);
      if (worker !== null && !this.window.dragged) this.choose(worker);
    });
    return made;
  }

  buttons() {
    const made = [
      ['zoom-in', '+', 'Zoom in (+)', () => this.window.zoom(0.5)],
      ['zoom-out', '−', 'Zoom out (−)', () => this.window.zoom(2)],
      ['left', '◀', 'Earlier (left arrow)', () => this.window.pan(-0.25)],
      ['right', '▶', 'Later (right arrow)', () => this.window.pan(0.25)],
      ['fit', 'All', 'Show the whole training (0)', () => this.window.fit()],
    ];
    return made.map(([id, text, title, action]) => {
      const button = element('button', {id, type: 'button', title, 'aria-label': title, text});
      button.addEventListener('click', action);
      return button;
    });
  }

  setJob(job, isOther) {
    this.job = job;
    if (isOther) {
      this.data = null;
      this.chosen = null;
      this.events = [];
      this.hide();
      empty(this.details);
      this.sortLanes(job.workers.map((_, worker) => worker), []);
    }
  }

  sortLanes(order, slow) {
    this.order = order;
    this.laneOf = [];
    order.forEach((worker, lane) => { this.laneOf[worker] = lane; });
    this.slow = new Set(slow);
  }

  setWorkers(workers) {
    this.events = workers.events;
    this.isStale = workers.rows.some(row => row.staleness_max > 0);
    this.staleness.hidden = !this.isStale;
    this.sortLanes(workers.lanes, workers.rows.filter(row => row.is_slow).map(row => row.worker));
    empty(this.legend).append(...legend(workers.sums));
    this.draw();
  }

  get laneHeight() {
    return Math.max(5, Math.min(26, Math.floor(620 / Math.max(1, this.job.workers.length))));
  }

  plot(canvas) {
    return {left: LEFT, width: Math.max(50, canvas.clientWidth - LEFT - RIGHT)};
  }

  // Fetches the window that is shown; null if a newer one was asked for meanwhile.
  async load() {
    // Without a width TensorBoard shows another tab; the page is drawn when it is shown again.
    if (!this.job || this.lanes.clientWidth < LEFT + 100) return null;
    const {begin, end} = this.window;
    const buckets = Math.max(20, Math.floor(this.plot(this.lanes).width / 4));
    const data = await this.request({job: this.job.id, begin, end, buckets});
    if (!data) return null;
    data.end = data.begin + data.secs * data.buckets;
    // Gradients of a few pixels would be a blur: then their sums say more.
    data.detail &&= data.worker.length / data.workers * 7 <= this.plot(this.lanes).width;
    this.data = data;
    this.draw();
    if (this.chosen !== null) this.describe(this.chosen);
    return data;
  }

  draw() {
    if (!this.job || !this.lanes.isConnected) return;
    this.drawOn(this.lanes, (...given) => this.drawLanes(...given));
    if (this.isStale) this.drawOn(this.heat, (...given) => this.drawCells(...given));
    const {begin, end, low} = this.window;
    this.range.textContent = `${secs(begin - low)} to ${secs(end - low)} (${secs(end - begin)} shown)`;
    const root = this.root;
    root.dataset.begin = begin;
    root.dataset.end = end;
    root.dataset.buckets = this.data ? this.data.buckets : 0;
    root.dataset.mode = this.data ? (this.data.detail ? 'gradients' : 'buckets') : 'none';
    this.exact.textContent = !this.data ? '' : this.data.detail ? 'Each gradient by itself.'
      : `Bars: shares of ${secs(this.data.secs)}${this.data.exact ? '' : ', interpolated between groups of updates'}. Zoom in to see each gradient.`;
  }

  // `drawData(pen, place, width, scale)` draws what is in the lanes.
  drawOn(canvas, drawData) {
    const {pen, width, scale} = this.prepare(canvas, this.job.workers.length * this.laneHeight + AXIS);
    const {begin, length} = this.window;
    const place = time => LEFT + (time - begin) / length * (width - LEFT - RIGHT);
    this.drawNames(pen, width);
    if (this.data) {
      pen.save();
      pen.beginPath();
      pen.rect(LEFT, AXIS, width - LEFT - RIGHT, this.job.workers.length * this.laneHeight);
      pen.clip();
      drawData(pen, Object.assign(place, {left: LEFT, width: width - LEFT - RIGHT}), width, scale);
      pen.restore();
    }
    this.drawEvents(pen, place, width);
    this.drawAxis(pen, width, place);
  }

  drawLanes(pen, place, width, scale) {
    const draw = this.data.detail ? drawGradients : drawBuckets;
    draw(pen, this.data, place, this.laneOf, this.laneHeight, AXIS, scale, this.chosen);
  }

  drawCells(pen, place, width) {
    const {data, laneHeight} = this;
    const step = data.buckets * data.workers, found = [];
    const accepted = data.channels.indexOf('accepted') * step, staleness = data.channels.indexOf('staleness_sum') * step;
    const joined = Math.max(1, Math.ceil(data.buckets / ((width - LEFT - RIGHT) / Math.max(8, laneHeight))));
    for (let bucket = 0; bucket < data.buckets; bucket += joined) {
      const last = Math.min(data.buckets, bucket + joined);
      const left = Math.max(LEFT, place(data.begin + bucket * data.secs));
      const right = Math.min(width - RIGHT, place(data.begin + last * data.secs));
      if (right <= left) continue;
      for (let worker = 0; worker < data.workers; worker++) {
        let sum = 0, gradients = 0;
        for (let each = bucket; each < last; each++) {
          sum += data.cells[staleness + each * data.workers + worker];
          gradients += data.cells[accepted + each * data.workers + worker];
        }
        if (gradients >= 0.05) found.push({mean: sum / gradients, left, right, top: AXIS + this.laneOf[worker] * laneHeight});
      }
    }
    // The scale ends at the largest mean that is drawn.
    const most = Math.max(0, ...found.map(cell => cell.mean));
    for (const {mean, left, right, top} of found) {
      const rgb = viridis(most ? mean / most : 0);
      pen.fillStyle = `rgb(${rgb})`;
      pen.fillRect(left, top, right - left + 0.3, laneHeight - 1);
      if (laneHeight >= 14 && right - left >= 24) {
        pen.fillStyle = rgb[0] * 0.3 + rgb[1] * 0.59 + rgb[2] * 0.11 > 128 ? '#000' : '#fff';
        pen.textAlign = 'center';
        pen.fillText(digits(mean).slice(0, 4), (left + right) / 2, top + laneHeight / 2);
      }
    }
    this.drawScale(most);
  }

  drawScale(most) {
    const steps = Array.from({length: 9}, (_, i) => {
      const box = element('span', {class: 'step'});
      box.style.backgroundColor = `rgb(${viridis(i / 8)})`;
      return box;
    });
    empty(this.scale).append(...(most ? [
      element('span', {text: '0'}), ...steps, element('span', {text: `${digits(most)} updates behind (mean of a cell)`}),
    ] : [element('span', {text: '0 in this window'})]));
  }

  prepare(canvas, height) {
    const scale = devicePixelRatio || 1;
    const width = canvas.parentElement.clientWidth;
    if (canvas.width !== Math.round(width * scale) || canvas.height !== Math.round(height * scale)) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.height = `${height}px`;
    }
    const pen = canvas.getContext('2d');
    pen.setTransform(scale, 0, 0, scale, 0, 0);
    pen.clearRect(0, 0, width, height);
    pen.font = `${Math.min(12, Math.max(9, this.laneHeight - 1))}px Roboto, Helvetica, Arial, sans-serif`;
    pen.textBaseline = 'middle';
    return {pen, width, scale};
  }

  drawNames(pen, width) {
    const palette = colours(), {laneHeight} = this;
    // Each name if there is room for it, else each second, fourth and so on.
    const every = laneHeight >= 9 ? 1 : Math.ceil(11 / laneHeight);
    this.order.forEach((worker, lane) => {
      const top = AXIS + lane * laneHeight, isSlow = this.slow.has(worker);
      pen.fillStyle = worker === this.chosen ? palette.line : palette.lane;
      pen.fillRect(worker === this.chosen ? 0 : LEFT, top, width - RIGHT - (worker === this.chosen ? 0 : LEFT), laneHeight - 1);
      if (lane % every && !isSlow) return;
      const font = pen.font;
      if (isSlow) pen.font = `bold ${font}`;
      pen.fillStyle = isSlow ? palette.dropped : palette.text;
      pen.textAlign = 'right';
      pen.fillText(fitting(pen, this.job.workers[worker], LEFT - 14), LEFT - 8, top + laneHeight / 2);
      pen.font = font;
    });
  }

  drawAxis(pen, width, place) {
    const palette = colours(), {begin, end, low} = this.window;
    const {step, values} = timeTicks(begin - low, end - low, (width - LEFT - RIGHT) / 100);
    pen.font = '11px Roboto, Helvetica, Arial, sans-serif';
    pen.fillStyle = palette.faint;
    pen.strokeStyle = palette.line;
    pen.textAlign = 'center';
    pen.lineWidth = 1;
    for (const value of values) {
      const x = Math.round(place(low + value)) + 0.5;
      pen.beginPath();
      pen.moveTo(x, AXIS - 22);
      pen.lineTo(x, AXIS - 18);
      pen.stroke();
      const text = tickSecs(value, step), half = pen.measureText(text).width / 2;
      pen.fillText(text, Math.min(width - half - 1, x), AXIS - 30);
    }
  }

  drawEvents(pen, place, width) {
    const palette = colours(), bottom = AXIS + this.job.workers.length * this.laneHeight;
    const {begin, end} = this.window;
    const shown = this.events.filter(event => event.time + event.secs >= begin && event.time <= end);
    for (const event of shown) {
      const left = Math.max(LEFT, place(event.time)), right = Math.min(width - RIGHT, place(event.time + event.secs));
      const lane = event.worker >= 0 ? AXIS + this.laneOf[event.worker] * this.laneHeight : AXIS;
      if (event.secs > 0) {
        pen.fillStyle = palette.faint;
        pen.globalAlpha = 0.3;
        pen.fillRect(left, AXIS - 4, Math.max(1.5, right - left), bottom - AXIS + 4);
        pen.globalAlpha = 1;
        continue;
      }
      pen.strokeStyle = palette.lost;
      pen.lineWidth = 1;
      pen.setLineDash([3, 3]);
      pen.beginPath();
      pen.moveTo(left, AXIS - 4);
      pen.lineTo(left, AXIS);
      pen.moveTo(left, lane);
      pen.lineTo(left, event.worker >= 0 ? lane + this.laneHeight : bottom);
      pen.stroke();
      pen.setLineDash([]);
    }
    pen.font = '11px Roboto, Helvetica, Arial, sans-serif';
    pen.fillStyle = palette.text;
    pen.textAlign = 'center';
    labels(shown, place, width, text => pen.measureText(text).width, (text, x) => pen.fillText(text, x, AXIS - 11));
  }

  workerAt(y) {
    const lane = Math.floor((y - AXIS) / this.laneHeight);
    return this.job && lane >= 0 && lane < this.order.length ? this.order[lane] : null;
  }

  choose(worker) {
    this.chosen = worker;
    this.draw();
    this.describe(worker);
  }

  // Writes the sums of a worker over the window below the timeline.
  describe(worker) {
    if (!this.data) return;
    const sums = this.sums(worker, 0, this.data.buckets);
    const entries = [['worker', this.job.workers[worker]], ['in', `${secs(this.data.end - this.data.begin)} shown`], ...rows(sums, this.data.end - this.data.begin)];
    empty(this.details).append(...entries.flatMap(([name, value]) => [
      element('dt', {text: name}), element('dd', {text: short(value, 120), 'data-name': name}),
    ]));
    this.live.textContent = entries.map(entry => entry.join(': ')).join(', ');
  }

  sums(worker, first, last) {
    const {data} = this, step = data.buckets * data.workers;
    return Object.fromEntries(data.channels.map((name, channel) => {
      let sum = 0;
      for (let bucket = first; bucket < last; bucket++) sum += data.cells[channel * step + bucket * data.workers + worker];
      return [name, sum];
    }));
  }

  key(event) {
    if (!this.job) return;
    const move = {ArrowUp: -1, ArrowDown: 1}[event.key];
    if (move) {
      const last = this.order.length - 1, lane = this.chosen === null ? -1 : this.laneOf[this.chosen];
      this.choose(this.order[this.chosen === null ? 0 : Math.min(last, Math.max(0, lane + move))]);
      event.preventDefault();
    } else if (event.key === 'Escape') {
      this.chosen = null;
      empty(this.details);
      this.hide();
      this.draw();
    } else {
      this.window.key(event);
    }
  }

  point(canvas, event) {
    const worker = this.workerAt(event.offsetY), {left, width} = this.plot(canvas);
    const time = this.window.begin + (event.offsetX - left) / width * this.window.length;
    if (worker === null || !this.data || event.offsetX < left || time > this.window.end) { this.hide(); return; }
    const entries = this.data.detail && canvas === this.lanes ? this.gradientAt(worker, time) : this.bucketAt(worker, time);
    const margin = this.window.length / width * 4;
    const near = this.events.filter(each => each.time - margin < time && time < each.time + each.secs + margin &&
      (each.worker === worker || each.worker < 0));
    for (const each of near.slice(0, 3)) entries.push([KINDS[each.kind]?.[0] ?? 'event', each.text]);
    empty(this.tip).append(
      element('strong', {text: `${short(this.job.workers[worker], 60)} at ${secs(time - this.window.low)}`}),
      ...entries.map(([name, value]) => element('div', {text: `${name}: ${short(String(value), 160)}`})));
    this.tip.hidden = false;
    const x = Math.min(event.clientX + 14, innerWidth - this.tip.offsetWidth - 8);
    const y = event.clientY + 16 + this.tip.offsetHeight > innerHeight ? event.clientY - this.tip.offsetHeight - 10 : event.clientY + 16;
    this.tip.style.left = `${x}px`;
    this.tip.style.top = `${y}px`;
  }

  hide() { this.tip.hidden = true; }

  bucketAt(worker, time) {
    const bucket = Math.floor((time - this.data.begin) / this.data.secs);
    if (bucket < 0 || bucket >= this.data.buckets) return [];
    return [['in', secs(this.data.secs)], ...rows(this.sums(worker, bucket, bucket + 1), this.data.secs)];
  }

  gradientAt(worker, time) {
    const {data} = this, at = time - data.begin;
    for (const [i, name, begin, end] of bars(data)) {
      if (data.worker[i] !== worker || at < begin || at >= end) continue;
      return [
        ['doing', DOING[name] ?? 'computing'], ['gradient', OUTCOMES[data.outcome[i]]], ['update', data.step[i]],
        ['computed for', secs(data.arrival[i] - data.start[i])],
        ['waited for the update', data.outcome[i] ? '-' : secs(Math.max(0, data.update[i] - data.arrival[i]))],
        ['staleness', data.staleness[i]], ['weight', digits(data.weight[i])], ['held back before', secs(data.held[i])],
      ];
    }
    return [['doing', 'idle, or not in the log']];
  }
}

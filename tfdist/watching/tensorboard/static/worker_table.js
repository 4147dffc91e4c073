// SPDX-License-Identifier: Apache-2.0
// The table of workers. The slow ones are first, then those that cost most; a click on a heading sorts by that column.

import {commonUnit, element, empty, count, digits, percent, short, whole} from './format.js';

// Key, heading, text of a cell (null: seconds, in one unit for the column), meaning.
const COLUMNS = [
  ['name', 'Worker', row => short(row.name, 40), 'Name of the worker'],
  ['cost_secs', 'Cost', null, 'Worker-seconds: the time in which all others of an update waited for its gradient alone, and that of its gradients that were dropped or lost'],
  ['last', 'Last to arrive', row => whole(row.last), 'Updates in which its gradient entered last'],
  ['input_p50', 'Input', null, 'Median time in which it waited for its batch'],
  ['computing_p50', 'Computing', null, 'Median time from its batch to its gradient'],
  ['rest_p50', 'Rest', null, 'Median time from the end of an all-reduce to its next call of the data: update, callbacks'],
  ['compute_p50', 'Gradient', null, 'Median time from start to arrival of a gradient, input included'],
  ['compute_p95', '95th percentile', null, '95th percentile of the time from start to arrival of a gradient'],
  ['accepted', 'Accepted', row => whole(row.accepted), 'Gradients that entered an update'],
  ['dropped', 'Dropped', row => `${whole(row.dropped)} (${percent(row.dropped / Math.max(1, row.accepted + row.dropped))})`, 'Gradients that were late and dropped'],
  ['lost', 'Lost', row => whole(row.lost), 'Gradients lost with their worker'],
  ['wait_secs', 'Waited for others', null, 'Sum: from its gradient to the last one that the update needs'],
  ['held_secs', 'Held back', null, 'Sum, beyond the wait: it had delivered a gradient and might not start the next one'],
  ['staleness_mean', 'Staleness', row => `${digits(row.staleness_mean)} (most ${whole(row.staleness_max)})`, 'Mean of the accepted gradients, and maximum'],
];
// Columns that are shown even if all their cells are zero.
const ALWAYS = new Set(['name', 'cost_secs', 'compute_p50', 'compute_p95', 'accepted']);
const FIRST_ROWS = 12;

export class WorkerTable {
  constructor(chosen) {
    this.chosen = chosen;
    // Without a key in the order of the server: the slow ones first.
    this.sorting = {key: null, descending: true};
    this.rows = [];
    this.isOpen = false;
    this.body = element('tbody');
    this.heads = COLUMNS.map(([key, , , title]) => {
      const button = element('button', {type: 'button', title});
      button.addEventListener('click', () => this.sort(key));
      return element('th', {scope: 'col', 'data-key': key}, [button]);
    });
    this.more = element('button', {type: 'button', class: 'more', hidden: ''});
    this.more.addEventListener('click', () => { this.isOpen = !this.isOpen; this.draw(); });
    this.note = element('p', {class: 'hint'});
    this.root = element('section', {'aria-label': 'Workers', id: 'workers'}, [
      element('h2', {text: 'Workers, slow ones first, then by what they cost'}),
      element('div', {class: 'scroll', tabindex: '0', role: 'region', 'aria-label': 'Table of workers'},
        [element('table', {}, [element('thead', {}, [element('tr', {}, this.heads)]), this.body])]),
      this.more, this.note,
    ]);
  }

  show(job, workers) {
    this.rows = workers.rows;
    this.note.textContent = workers.detail_updates < job.updates
      ? `Costs and percentiles are of the newest ${count(workers.detail_updates, 'update')}.` : '';
    this.draw();
  }

  clear() {
    this.rows = [];
    this.draw();
  }

  sort(key) {
    const {sorting} = this;
    this.sorting = {key, descending: sorting.key === key ? !sorting.descending : key !== 'name'};
    this.draw();
  }

  draw() {
    const {key, descending} = this.sorting;
    const hidden = new Set(COLUMNS.map(column => column[0]).filter(each =>
      !ALWAYS.has(each) && this.rows.every(row => !row[each])));
    const order = (one, other) => (typeof one[key] === 'string'
      ? one[key].localeCompare(other[key], 'en', {numeric: true}) : one[key] - other[key]);
    const sorted = key ? [...this.rows].sort((one, other) => (descending ? -1 : 1) * order(one, other)) : this.rows;
    const units = new Map(COLUMNS.filter(column => !column[2]).map(([each]) => [each, commonUnit(this.rows.map(row => row[each]))]));
    COLUMNS.forEach(([each, text], i) => {
      this.heads[i].firstChild.textContent = units.has(each) ? `${text}, ${units.get(each).unit}` : text;
    });
    for (const head of this.heads) {
      head.hidden = hidden.has(head.dataset.key);
      head.setAttribute('aria-sort', head.dataset.key === key ? (descending ? 'descending' : 'ascending') : 'none');
    }
    const most = Math.max(...this.rows.map(row => row.cost_secs), 0);
    const shown = this.isOpen ? sorted : sorted.slice(0, FIRST_ROWS);
    empty(this.body).append(...shown.map(row => this.line(row, most, hidden, units)));
    this.more.hidden = sorted.length <= FIRST_ROWS;
    this.more.textContent = this.isOpen ? 'Show fewer' : `Show all ${sorted.length} workers`;
  }

  line(row, most, hidden, units) {
    const cells = COLUMNS.filter(column => !hidden.has(column[0])).map(([key, , text]) => {
      const cell = element(key === 'name' ? 'th' : 'td', key === 'name' ? {scope: 'row'} : {'data-key': key});
      if (key === 'name') {
        const button = element('button', {type: 'button', class: 'link', text: text(row), title: 'Mark its lane in the timeline'});
        button.addEventListener('click', () => this.chosen(row.worker));
        cell.append(button);
      } else {
        cell.textContent = text ? text(row) : units.get(key).text(row[key]);
        cell.dataset.value = row[key];
      }
      if (key === 'cost_secs' && most) {
        cell.classList.add('bar-cell');
        cell.style.setProperty('--part', `${100 * row.cost_secs / most}%`);
      }
      return cell;
    });
    return element('tr', {'data-worker': row.worker, ...(row.is_slow ? {class: 'slow'} : {})}, cells);
  }
}
